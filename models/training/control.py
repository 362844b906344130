"""What rank 0 decides and every rank must know: small records, broadcast as JSON.

Plans travel from a background thread while the training thread reduces gradients and sums: each has a group of its own,
since collectives of two threads in one group may meet in another order on another rank. So have the ranks that share
samples: one for what they compute, one for what they fetch.
"""

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from infra.records.data_path import Record
from infra.settings import rank_from_environment, ranks_store
from models.checkpoint import SAVE_S

R = TypeVar("R", bound=Record)


class Control:
    """This rank's place among the trainer's ranks, with a gloo group for decisions and one for sums.

    Ranks `g * C .. g * C + C - 1` share the samples of group g, C being the `context_parallel_size`.

    `wait_s`: seconds that ranks wait for each other, longer than whatever one of them may have to wait for.
    """

    def __init__(self, context_parallel_size: int = 1, wait_s: float = SAVE_S) -> None:
        self.rank, self.world, self.local_rank, self.local_world = rank_from_environment()
        assert self.world % context_parallel_size == 0, "checked with the recipe"
        self.groups, self.group = self.world // context_parallel_size, self.rank // context_parallel_size
        self.context_size, self.context_rank = context_parallel_size, self.rank % context_parallel_size
        self.context: dist.ProcessGroup | None = None
        self._fetched: dist.ProcessGroup | None = None
        self._decisions: dist.ProcessGroup | None = None
        self._sums: dist.ProcessGroup | None = None
        wait = timedelta(seconds=wait_s)
        if self.world > 1:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            if backend == "nccl":
                torch.cuda.set_device(self.local_rank)
            # A file, because a TCP store has no authentication.
            store = f"file://{ranks_store()}"
            # Left to itself NCCL ends all ranks after ten minutes of one's silence, and gloo after thirty.
            dist.init_process_group(backend, init_method=store, rank=self.rank, world_size=self.world, timeout=wait)
            self._decisions, self._sums = (_own_subgroup(self.world, "gloo", wait) for _ in range(2))
        if context_parallel_size > 1:
            self.context, self._fetched = (_own_subgroup(context_parallel_size, how, wait) for how in (None, "gloo"))

    def decide(self, record: R | None, kind: type[R]) -> R | None:
        """Rank 0's `record` on every rank (other ranks pass None)."""
        if self._decisions is None:
            return record
        text = record.model_dump_json().encode() if record is not None else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0, group=self._decisions)
        if not int(size):
            return None
        data = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._decisions)
        return kind.model_validate_json(data.numpy().tobytes())

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over all ranks."""
        if self._sums is not None:
            values = values.cpu()
            dist.all_reduce(values, group=self._sums)
        return values

    def greatest(self, value: int) -> int:
        """Over all ranks."""
        values = torch.tensor([value])
        if self._sums is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._sums)
        return int(values)

    def wait_for_all(self) -> None:
        """Return when every rank is here."""
        if self._sums is not None:
            dist.barrier(group=self._sums)

    def wait_for_plan(self) -> None:
        """Return when every rank has done its part of the plan. For the thread that calls `decide`."""
        if self._decisions is not None:
            dist.barrier(group=self._decisions)

    def wait_for_fetched(self) -> None:
        """Return when every rank that shares this one's samples has fetched as many of them. For one thread."""
        if self._fetched is not None:
            dist.barrier(group=self._fetched)

    def close(self) -> None:
        if self._sums is not None:
            dist.destroy_process_group()


def _own_subgroup(size: int, backend: str | None, wait: timedelta) -> dist.ProcessGroup:
    """This rank's group, where every `size` consecutive ranks form one."""
    group, _ = dist.new_subgroups(size, backend=backend, timeout=wait)
    assert isinstance(group, dist.ProcessGroup)
    return group
