"""What rank 0 decides and every rank must know: small records, broadcast as JSON. Runs in every trainer rank."""

import os
from typing import TypeVar

import torch
import torch.distributed as dist

from infra.records import Record
from infra.settings import rank_from_environment

R = TypeVar("R", bound=Record)
TIMEOUT_S = 1800


class Control:
    """This rank's place among the trainer's ranks, and a gloo group of its own for decisions."""

    def __init__(self) -> None:
        self.rank, self.world = rank_from_environment()
        self._group: dist.ProcessGroup | None = None
        if self.world > 1:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
            # Plans travel from a background thread, so they must not share a group with gradients.
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    def decide(self, record: R | None, kind: type[R]) -> R | None:
        """Rank 0's `record` on every rank (other ranks pass None)."""
        if self._group is None:
            return record
        text = record.model_dump_json().encode() if record is not None else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0, group=self._group)
        if not int(size):
            return None
        data = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(data, src=0, group=self._group)
        return kind.model_validate_json(data.numpy().tobytes())

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over all ranks."""
        if self._group is not None:
            values = values.cpu()
            dist.all_reduce(values, group=self._group)
        return values

    def wait_for_all(self) -> None:
        """Return when every rank is here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group()
