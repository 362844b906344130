"""The draft vocabulary: which target tokens a draft can propose, and the maps between the two numberings."""

from dataclasses import dataclass

import torch
from torch import Tensor

from infra.refusal import Refusal


@dataclass(frozen=True)
class DraftVocabulary:
    """`target_ids` `[Vd]` int64, ascending and distinct: draft id i is target id `target_ids[i]`."""

    target_ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or ids.dtype != torch.int64 or not len(ids):
            raise Refusal("a draft vocabulary is a non-empty vector of int64 target ids")
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise Refusal(f"draft vocabulary ids must be ascending, distinct and below {self.target_size}")

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def whole(self) -> bool:
        """Whether it is the target's own."""
        return len(self) == self.target_size

    @classmethod
    def by_frequency(cls, counts: Tensor, size: int) -> "DraftVocabulary":
        """The `size` most frequent target tokens of `counts` `[V]`; ties go to the smaller id."""
        if size > len(counts):
            raise Refusal(
                f"draft.vocab_size {size} exceeds the target's vocabulary of {len(counts)} tokens: set it to at most "
                f"{len(counts)}"
            )
        order = torch.sort(counts, descending=True, stable=True).indices[:size]
        return cls(order.sort().values, len(counts))

    @classmethod
    def from_offsets(cls, d2t: Tensor, target_size: int) -> "DraftVocabulary":
        """The vocabulary of an exported map: target id = draft id + `d2t[draft id]`."""
        return cls(d2t.long() + torch.arange(len(d2t)), target_size)

    @property
    def d2t(self) -> Tensor:
        """`[Vd]` int64 offsets: target id minus draft id."""
        return self.target_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """`[V]` bool: whether a target token is in the draft vocabulary."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask
