"""Context parallelism: the ranks of a group share every sample, each computing some of its rows.

A sample's rows are cut into 2C runs of about equal length, and rank r of C takes runs r and 2C - 1 - r (arXiv
2407.21783, section 3.3.2): causal attention gives later rows more to do, and of C runs the last would be nearly twice
the mean. Keys and values are gathered from all ranks once per micro-batch, since every step of a draft's training-time
test attends to the first step's; a ring would send as much at every step. Everything else is local: a rank also holds
the target's states of the positions that its rows predict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RowRange(NamedTuple):
    """Rows `start .. stop - 1` of one sample."""

    sample: int
    """Which of the packed ones."""
    start: int
    stop: int
    offset: int
    """Index of the sample's first token among the packed rows."""

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def packed(self) -> slice:
        return slice(self.offset + self.start, self.offset + self.stop)


@dataclass(frozen=True)
class ContextShare:
    """What one rank of a group computes of packed samples."""

    lengths: tuple[int, ...]
    """Lengths of the whole samples, identical on all ranks of the group."""
    size: int
    rank: int
    """Rank in the group."""
    reach: int
    """S: a row predicts the next token of each of the S positions after it."""
    group: dist.ProcessGroup | None = None
    """None if nothing is gathered."""

    @property
    def runs(self) -> tuple[RowRange, ...]:
        """This rank's rows."""
        return _runs(self.lengths, self.size, self.rank)

    @property
    def states(self) -> tuple[RowRange, ...]:
        """Positions whose next token this rank's rows predict; their last states are needed here."""
        reached = ((r, r.start + 1, min(r.stop + self.reach, self.lengths[r.sample])) for r in self.runs)
        return _joined(run._replace(start=start, stop=stop) for run, start, stop in reached if start < stop)

    def packed_rows(self, device: torch.device) -> Tensor:
        """`[R]` this rank's rows among the packed ones, ascending."""
        return _numbers(self.runs, device, packed=True)

    def positions(self, device: torch.device) -> Tensor:
        """`[R]` the positions of this rank's rows in their samples."""
        return _numbers(self.runs, device, packed=False)

    def row_index(self, device: torch.device) -> Tensor:
        """`[N]` index of a packed row among this rank's rows; -1 for other ranks' rows."""
        return self._index(self.runs, device)

    def state_index(self, device: torch.device) -> Tensor:
        """`[N]` index of a packed position among those whose last state is here; -1 for others."""
        return self._index(self.states, device)

    def _index(self, runs: Sequence[RowRange], device: torch.device) -> Tensor:
        places = _numbers(runs, device, packed=True)
        index = torch.full((sum(self.lengths),), -1, device=device)
        return index.index_copy_(0, places, torch.arange(len(places), device=device))

    def gather(self, *mine: Tensor) -> tuple[Tensor, ...]:
        """Each `[R, ...]` of this rank's rows as `[N, ...]` of all; gradients go back to the rank that they are of.

        All ranks of the group call it at the same time, and in the backward pass too.
        """
        return _Gather.apply(self, *mine)  # type: ignore[return-value]


def _runs(lengths: Sequence[int], size: int, rank: int) -> tuple[RowRange, ...]:
    found, offset = [], 0
    for sample, length in enumerate(lengths):
        for run in (rank, 2 * size - 1 - rank):
            start, stop = (length * cut // (2 * size) for cut in (run, run + 1))
            if start < stop:
                found.append(RowRange(sample, start, stop, offset))
        offset += length
    return _joined(found)


def _joined(runs: Iterable[RowRange]) -> tuple[RowRange, ...]:
    """Runs in order, those that touch or overlap as one."""
    found: list[RowRange] = []
    for run in runs:
        if found and found[-1].sample == run.sample and found[-1].stop >= run.start:
            found[-1] = found[-1]._replace(stop=max(run.stop, found[-1].stop))
        else:
            found.append(run)
    return tuple(found)


def _numbers(runs: Sequence[RowRange], device: torch.device, packed: bool) -> Tensor:
    offsets = [run.offset if packed else 0 for run in runs]
    parts = [torch.arange(o + r.start, o + r.stop, device=device) for o, r in zip(offsets, runs, strict=True)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


class _Gather(torch.autograd.Function):
    """Ranks hold different numbers of rows and collectives want equal ones, so what is sent is padded."""

    @staticmethod
    def forward(ctx: Any, share: ContextShare, *mine: Tensor) -> tuple[Tensor, ...]:
        ctx.share, ctx.shapes = share, [x.shape[1:] for x in mine]
        ctx.of_ranks = [_numbers(_runs(share.lengths, share.size, r), mine[0].device, True) for r in range(share.size)]
        sent = _padded(torch.cat([x.flatten(1) for x in mine], dim=1), ctx.of_ranks)
        received = [torch.empty_like(sent) for _ in ctx.of_ranks]
        dist.all_gather(received, sent, group=share.group)
        whole = sent.new_empty(sum(share.lengths), sent.shape[1])
        for rows, part in zip(ctx.of_ranks, received, strict=True):
            whole[rows] = part[: len(rows)]
        return _apart(whole, ctx.shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        whole = torch.cat([x.flatten(1) for x in gradients], dim=1)
        sent = [_padded(whole[rows], ctx.of_ranks) for rows in ctx.of_ranks]
        mine = torch.empty_like(sent[0])
        dist.reduce_scatter(mine, sent, group=ctx.share.group)
        return (None, *_apart(mine[: len(ctx.of_ranks[ctx.share.rank])], ctx.shapes))


def _padded(rows: Tensor, of_ranks: Sequence[Tensor]) -> Tensor:
    """With zeros up to the number of rows of the rank that holds most."""
    padded = rows.new_zeros(max(map(len, of_ranks)), rows.shape[1])
    padded[: len(rows)] = rows
    return padded


def _apart(together: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    parts = together.split([shape.numel() for shape in shapes], dim=1)
    return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True))
