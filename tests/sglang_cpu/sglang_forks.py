"""For processes of SGLang's environment, of which a server is three: on a CPU they start in a third of the time.

Each imports this first (sglang_forks.pth).

While they import they seldom search for garbage, and a server that computes on the CPU forks its processes, which then
need not import SGLang once more. With `DRAFTSMITH_TEST_SPAWN=1` it spawns them, as SGLang does. On GPUs it always does:
this environment may serve there after the tests, and a forked process cannot use CUDA.
"""

import gc
import multiprocessing
import os
import sys
from itertools import pairwise

gc.set_threshold(100_000, 20, 20)
_set_start_method = multiprocessing.set_start_method


def _forking(method: str | None, force: bool = False) -> None:
    on_cpu = ("--device", "cpu") in pairwise(sys.argv)
    _set_start_method("fork" if method == "spawn" and on_cpu else method, force)


if not os.environ.get("DRAFTSMITH_TEST_SPAWN"):
    multiprocessing.set_start_method = _forking
