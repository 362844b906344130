"""The trainer with every gradient reduction counted; `test_ranks.py` starts two ranks of it.

Arguments are the run and the file to which rank 0 writes the number of reduced buckets.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from models.run import PreparedRun
from models.training.control import Control
from models.training.trainer import open_trainer

reduced = 0


def counting_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    global reduced  # noqa: PLW0603
    reduced += 1
    return allreduce_hook(None, bucket)


class Counting(DistributedDataParallel):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, bucket_cap_mb=1024)
        self.register_comm_hook(None, counting_hook)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.nn.parallel.DistributedDataParallel = Counting
    from lightning.pytorch.strategies import ddp

    ddp.DistributedDataParallel = Counting  # pyright: ignore[reportPrivateImportUsage]
    control = Control()
    open_trainer(PreparedRun.open(Path(sys.argv[1])), control).fit()
    if control.rank == 0:
        Path(sys.argv[2]).write_text(str(reduced))
    control.close()
