"""Proposing for several texts: what a step hands over, and sources that go text by text. Runs in benchmarks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from models.drafts.base import Likeliest, ObservingProposer, Proposals, Proposer
from models.drafts.sampling import Sampling, chances, draw_by
from models.drafts.trees import ROOT, Tree, TreeProposer, TreeShape


@dataclass(frozen=True)
class Turn:
    """What one text hands over in a step, and what it wants."""

    text: Sequence[int]
    """Every token emitted so far, t + 1; the last one has not been through the target."""
    aux: Tensor
    """`[n, K*H]`, target features of positions `t - n .. t - 1`, which were not handed over yet; n >= 1."""
    shape: int | TreeShape
    """A chain of so many proposals, at least 1, or a tree."""
    sampling: Sampling


class BatchProposer(Protocol):
    """Proposes for B texts, row by row; holds the draft's caches."""

    branches: bool
    """Whether it can propose trees."""
    candidates: int
    """How many of the target's likeliest tokens it wants to `observe`; 0: it observes nothing."""

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """What the next step of these rows verifies; the others keep what they have to hand over.

        All turns have the same temperature and top-p; each row draws by its own generator.
        """
        ...

    def observe(self, row: int, tokens: Tensor, likeliest: Likeliest) -> None:
        """See `ObservingProposer.observe`."""
        ...

    def only(self, rows: Sequence[int]) -> None:
        """Let the other rows go."""
        ...


class TextByText:
    """A batch of proposers that know one text each."""

    def __init__(self, proposers: Sequence[Proposer]):
        self.proposers = list(proposers)
        first = self.proposers[0]
        self.branches = hasattr(first, "propose_tree")
        self.candidates = first.candidates if isinstance(first, ObservingProposer) else 0

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `BatchProposer.propose`."""
        return {row: _alone(self.proposers[row], turn) for row, turn in turns.items()}

    def observe(self, row: int, tokens: Tensor, likeliest: Likeliest) -> None:
        """See `ObservingProposer.observe`."""
        proposer = self.proposers[row]
        assert isinstance(proposer, ObservingProposer)
        proposer.observe(tokens, likeliest)

    def only(self, rows: Sequence[int]) -> None:
        """Let the other rows go."""
        self.proposers = [self.proposers[row] for row in rows]


def _alone(proposer: Proposer, turn: Turn) -> Tree:
    sequence, sampling = torch.tensor(turn.text, device=turn.aux.device), turn.sampling
    if not isinstance(turn.shape, int):
        return cast(TreeProposer, proposer).propose_tree(sequence, turn.aux, turn.shape, sampling)
    if sampling.greedy:
        proposals = Proposals(proposer.propose(sequence, turn.aux, turn.shape), None)
    else:
        proposals = proposer.sample(sequence, turn.aux, turn.shape, sampling)
    assert len(proposals.tokens) <= turn.shape
    return Tree.chain(proposals)


class OneByOne(ABC):
    """A source whose proposers know one text each."""

    @abstractmethod
    def proposer(self) -> Proposer:
        """A fresh proposer for one text."""

    def proposers(self, count: int) -> TextByText:
        """See `Source.proposers`."""
        return TextByText([self.proposer() for _ in range(count)])


class ObservingSource(OneByOne):
    """A source of observing proposers; it has no rollout, which is given features only."""

    candidates: int

    @abstractmethod
    def proposer(self) -> ObservingProposer:
        """A fresh proposer for one sequence: nothing is carried from one text to the next."""


class Choice:
    """How the rows of a batch choose their chains' tokens: the likeliest ones, or each drawn by its own generator.

    Args:
        turns: of every row, at least one of them; rows without one, or that want trees, have chains of length 0.
        target_ids: `[Vd]` int64, the target's ids of the draft vocabulary.
        vocabulary: V, tokens of the target.
        most: longest chain that the draft can propose; None: any.
    """

    def __init__(self, turns: Sequence[Turn | None], target_ids: Tensor, vocabulary: int, most: int | None = None):
        wanted = [turn.shape if turn and isinstance(turn.shape, int) else 0 for turn in turns]
        self.counts = [count if most is None else min(count, most) for count in wanted]
        self.longest = max(self.counts)
        self.target_ids, self.vocabulary = target_ids, vocabulary
        self.sampling = next(turn.sampling for turn in turns if turn)
        self._chances: Tensor | None = None
        if self.longest and not self.sampling.greedy:
            samplings = [turn.sampling if turn else self.sampling for turn in turns]
            self._chances = chances(samplings, self.counts, target_ids.device)
        self._drawn_from: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def next(self, logits: Tensor) -> Tensor:
        """The rows' next tokens `[B]`, target ids, from `[B, Vd]` logits."""
        if self._chances is None:
            found = logits.argmax(-1)
        else:
            self._drawn_from.append(self.sampling.distribution(logits))
            found = draw_by(self._drawn_from[-1], self._chances[:, len(self._tokens)])
        self._tokens.append(self.target_ids[found])
        return self._tokens[-1]

    def chains(self) -> list[Tree]:
        """Of every row, with what it was drawn from written over the target's vocabulary."""
        parents, tokens = tuple(range(ROOT, self.longest - 1)), self.target_ids.new_empty(len(self.counts), 0)
        if self._tokens:
            tokens = torch.stack(self._tokens, dim=1)
        over = None
        if self._drawn_from:
            over = self._drawn_from[0].new_zeros(*tokens.shape, self.vocabulary)
            over[..., self.target_ids] = torch.stack(self._drawn_from, dim=1)
        return [
            Tree(Proposals(tokens[row, :count], None if over is None else over[row, :count]), parents[:count])
            for row, count in enumerate(self.counts)
        ]
