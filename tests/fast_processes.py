"""Has the tests' processes start fast; see every_process/."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EVERY_PROCESS = str(Path(__file__).parent / "every_process")
SHORT = "/dev/shm"  # a socket has a short path
KEPT = (
    *("models.targets.prepare", "models.preflight", "models.regeneration.regenerate", "models.data.prepare"),
    *("models.capture.generator", "models.training.trainer", "models.export.sglang"),
    *("models.benchmark.run", "models.benchmark.served", "models.benchmark.smoke"),
)
"""Modules that import torch, of which a run of the tests starts many."""


def read_first() -> None:
    """Have each Python process read every_process/sitecustomize.py."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if EVERY_PROCESS not in places:
        os.environ["PYTHONPATH"] = os.pathsep.join([EVERY_PROCESS, *filter(None, places)])


def start_keeper() -> None:
    """Have processes of `KEPT` fork instead of importing torch each."""
    folder = Path(tempfile.mkdtemp(prefix="tests-of-draftsmith-", dir=SHORT if os.access(SHORT, os.W_OK) else None))
    atexit.register(shutil.rmtree, folder)
    command = [sys.executable, f"{EVERY_PROCESS}/keeper.py", str(folder), *KEPT]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE)
    atexit.register(keeper.communicate)  # it ends with its input
    os.environ["DRAFTSMITH_TEST_KEEPER"] = str(folder)
