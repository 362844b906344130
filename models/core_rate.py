"""`python -m models.core_rate`: what one core of this machine multiplies, in FLOP/s by data type, as JSON."""

import json
import time

import torch

from infra.planner.shapes import ITEM_BYTES
from infra.processes.exit import run_main

SIZE, SECONDS = 1024, 0.15
"""Of a product, and of the measurement for a data type."""


def core_rate(dtype: torch.dtype) -> float:
    """Of the fastest large product in a while: others on the machine make some slower, and none faster."""
    left, right = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    torch.mm(left, right)
    fastest, end = float("inf"), time.perf_counter() + SECONDS
    while (begun := time.perf_counter()) < end:
        torch.mm(left, right)
        fastest = min(fastest, time.perf_counter() - begun)
    return 2 * SIZE**3 / fastest


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: core_rate(getattr(torch, name)) for name in ITEM_BYTES}))


if __name__ == "__main__":
    run_main(main)
