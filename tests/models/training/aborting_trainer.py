"""The trainer in a process that aborts when its interpreter ends; `test_ranks.py` starts ranks of it."""

import atexit
import os
import sys

from models.training import trainer

if __name__ == "__main__":
    atexit.register(os.abort)
    sys.argv += ["--parent", str(os.getppid())]
    trainer.main()
