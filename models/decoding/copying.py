"""Baselines without training that copy: each text proposes by its own tokens, whatever the target's features."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from models.drafts.batched_proposer import DraftProposer, Turn
from models.drafts.trees import Tree, certain


class CopiedText(Protocol):
    """A growing text."""

    tokens: list[int]

    def extend(self, tokens: Iterable[int]) -> None: ...

    def propose(self, lookahead: int) -> list[int]:
        """`lookahead` tokens that may follow, `NO_PROPOSAL` where there are none."""
        ...


class CopyingSource:
    """Proposes chains with certainty.

    Args:
        new_text: makes an empty text.
    """

    def __init__(self, new_text: Callable[[], CopiedText]):
        self.new_text = new_text

    def proposers(self, count: int) -> "CopyingProposer":
        return CopyingProposer([self.new_text() for _ in range(count)])

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        """`[T - first, lookahead]` int64; see `RolloutSource.rollout`."""
        text, ids, rows = self.new_text(), tokens.tolist(), list[list[int]]()
        text.extend(ids[: first + 1])
        for token in ids[first + 1 :]:
            text.extend([token])
            rows.append(text.propose(lookahead))
        return torch.tensor(rows, dtype=torch.long, device=tokens.device).view(-1, lookahead)


class CopyingProposer(DraftProposer):
    """Chains for several texts, proposed with certainty."""

    def __init__(self, texts: list[CopiedText]):
        self._texts = texts

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`."""
        trees = {}
        for row, turn in turns.items():
            text = self._texts[row]
            text.extend(turn.text[len(text.tokens) :])
            assert isinstance(turn.shape, int)
            trees[row] = Tree.chain(certain(text.propose(turn.shape), turn.aux.device))
        return trees

    def only(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._texts = [self._texts[row] for row in rows]
