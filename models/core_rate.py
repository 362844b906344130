"""`python -m models.core_rate`: FLOP/s of matrix products on one core of this machine, by data type, as JSON."""

import json
import time

import torch

from infra.planner.shapes import ITEM_BYTES
from infra.processes.exit import run_main

SIZE, SECONDS = 1024, 0.15
"""Rows and columns of the matrices; duration of the measurement for each data type."""


def core_rate(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several products: other load on the machine can only slow them down."""
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
