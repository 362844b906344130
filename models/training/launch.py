"""Starts the trainer's ranks: torchrun's agent, which ends with the status of the rank that failed first.

`python -m models.training.launch RUN --ranks N`. torchrun itself always ends with 1 and prints a page of its own, so
that neither a person nor whoever restarts it learns what happened.
"""

import argparse
import logging
import os
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs = ["--log-dir", str(options.run / "logs" / "ranks")]  # by default a folder that torchrun leaves in /tmp
    ranks = ["--standalone", "--nproc-per-node", str(options.ranks), *logs]
    try:
        trainer = ["-m", "models.training.trainer", str(options.run), "--parent", str(os.getpid())]
        torchrun.run(torchrun.parse_args([*ranks, *trainer]))
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as signal:
        raise SystemExit(128 + signal.sigval) from None


if __name__ == "__main__":
    main()
