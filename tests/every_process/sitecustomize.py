"""Python reads this first in every process of the tests (`PYTHONPATH=tests/every_process`).

What a process imports stays, and with torch it is half a million objects: searched for garbage as often as usual, they
cost a tenth of each start, of which the tests have hundreds. A process that may lease GPUs which do not exist finds no
driver, which would not know them; one that leases such a GPU computes on the CPU. A module of `models` forks from a
process that has its imports; see keeper.py.
"""

import gc
import os
import sys

gc.set_threshold(100_000, 20, 20)
if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-fake"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if os.environ.get("DRAFTSMITH_GPUS", "").startswith("GPU-fake"):
    import pynvml

    def _no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    pynvml.nvmlInit = _no_driver
if os.environ.get("DRAFTSMITH_TEST_KEEPER") and sys.orig_argv[1:2] == ["-m"]:
    import keeper

    keeper.ask_for(sys.orig_argv[2:])
