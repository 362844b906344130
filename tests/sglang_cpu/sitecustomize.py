"""For processes of SGLang's environment, of which a server is three: they start in a third of the time.

A server that a test starts forks its processes, which then need not import SGLang once more, and while they import it
they seldom search for garbage. On GPUs SGLang spawns them; with `DRAFTSMITH_TEST_SPAWN=1` it does so here too.
"""

import gc
import multiprocessing
import os
from typing import Any

gc.set_threshold(100_000, 20, 20)
_set_start_method = multiprocessing.set_start_method


def _forking(method: str | None, force: bool = False) -> Any:
    return _set_start_method("fork" if method == "spawn" else method, force)


if not os.environ.get("DRAFTSMITH_TEST_SPAWN"):
    multiprocessing.set_start_method = _forking
