"""`python -m models.core_rate`: FLOP/s of matrix products on one core of this machine, by data type, as JSON.

All cores compute at once, as they do in a run: hyperthreads share a matrix unit, and one alone is up to three times as
fast.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from infra.planner.shapes import ITEM_BYTES
from infra.processes.control_groups import cores
from infra.processes.exit import run_main

SIZE, ROUNDS, ROUND_S = 1024, 3, 0.1
"""Rows and columns of the matrices; measurements for each data type, and the duration of one."""


def core_rate(dtype: torch.dtype, count: int) -> float:
    """FLOP/s of one of `count` cores in the best round: other load on the machine can only slow them down."""
    left, right = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))

    def products(_core: int) -> float:
        torch.mm(left, right)
        done, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < ROUND_S:
            torch.mm(left, right)  # leaves Python's lock to the others
            done += 1
        return done / elapsed

    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        rounds = [sum(threads.map(products, range(count))) for _ in range(ROUNDS)]
    return 2 * SIZE**3 * max(rounds) / count


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: core_rate(getattr(torch, name), cores()) for name in ITEM_BYTES}))


if __name__ == "__main__":
    run_main(main)
