"""Sources that tests script: an own proposer for each text, with `propose`, `sample` or `propose_tree`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.drafts.batched_proposer import Turn
from models.drafts.growing_trees import GrowingTrees
from models.drafts.trees import DynamicTree, Proposals, Tree


def grown(shape: DynamicTree, text: Tensor, logits: Callable[[Tensor], Tensor], target_ids: Tensor) -> Tree:
    """A tree after a text `[t]`, by the logits `[w, Vd]` after texts `[w, t + depth]`."""
    trees, texts = GrowingTrees(1, shape.topk, text.device), text.view(1, 1, -1)
    for depth in range(shape.depth):
        if depth:
            beams = trees.descend()
            before = texts.take_along_dim(beams.parents.unsqueeze(-1), dim=1)
            texts = torch.cat([before, beams.tokens.unsqueeze(-1)], dim=-1)
        trees.add(texts, logits, target_ids)
    return trees.kept(shape.tokens)[0]


class TextByText:
    """A source; subclasses have `proposer()`."""

    def proposer(self) -> Any:
        raise NotImplementedError

    def proposers(self, count: int) -> "Rows":
        return Rows([self.proposer() for _ in range(count)])


class Rows:
    """The proposers of several texts as one batched proposer."""

    candidates, confidences = 0, None

    def __init__(self, proposers: Sequence[Any]):
        self.proposers = list(proposers)
        self.branches = hasattr(self.proposers[0], "propose_tree")

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        return {row: self._alone(self.proposers[row], turn) for row, turn in turns.items()}

    def observe(self, row: int, tokens: Tensor, likeliest: Tensor) -> None:
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
