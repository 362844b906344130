"""Sources that tests script: an own proposer for each text, with `propose`, `sample` or `propose_tree`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.drafts.batched_proposer import Turn
from models.drafts.trees import Likeliest, Proposals, Tree


class TextByText:
    """A source; subclasses have `proposer()`."""

    def proposer(self) -> Any:
        raise NotImplementedError

    def proposers(self, count: int) -> "Rows":
        return Rows([self.proposer() for _ in range(count)])


class Rows:
    """The proposers of several texts as one batched proposer."""

    candidates = 0

    def __init__(self, proposers: Sequence[Any]):
        self.proposers = list(proposers)
        self.branches = hasattr(self.proposers[0], "propose_tree")

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        return {row: self._alone(self.proposers[row], turn) for row, turn in turns.items()}

    def observe(self, row: int, tokens: Tensor, likeliest: Likeliest) -> None:
        raise AssertionError

    def only(self, rows: Sequence[int]) -> None:
        self.proposers = [self.proposers[row] for row in rows]

    @staticmethod
    def _alone(proposer: Any, turn: Turn) -> Tree:
        sequence, sampling = torch.tensor(turn.text), turn.sampling
        if not isinstance(turn.shape, int):
            return proposer.propose_tree(sequence, turn.aux, turn.shape, sampling)
        if hasattr(proposer, "sample") and not sampling.greedy:
            proposals = proposer.sample(sequence, turn.aux, turn.shape, sampling)
        else:
            proposals = Proposals(proposer.propose(sequence, turn.aux, turn.shape), None)
        assert len(proposals.tokens) <= turn.shape
        return Tree.chain(proposals)
