"""Proposing for several texts: what a step hands over, and sources that go text by text. Runs in benchmarks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from models.drafts.proposals import Likeliest, Proposals
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


class Proposer(Protocol):
    """Proposes tokens for one sequence while it is decoded; holds the draft's own cache."""

    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Propose the next `lookahead` tokens.

        Args:
            sequence: `[t + 1]` int64, every token emitted so far; the last one has not been through the target.
            aux: `[n, K*H]`, target features of positions `t - n .. t - 1`, which this proposer has not seen yet.
            lookahead: number of tokens to propose, at least 1.

        Returns:
            `[lookahead]` int64, target-vocabulary ids.
        """
        ...

    def sample(self, sequence: Tensor, aux: Tensor, lookahead: int, sampling: Sampling) -> Proposals:
        """Propose the next `lookahead` tokens as `propose` does, but drawn after temperature and top-p.

        A source that knows tokens only proposes them with certainty.
        """
        ...


class ObservingProposer(ABC):
    """A `Proposer` that also learns from what the target itself found likely.

    It is told of every position of the text once, in order, before it proposes what follows, and of nothing else:
    what the target said after a rejected proposal is no position of the text. So its proposals depend on the text so
    far alone, and walking over a finished text meets the same ones as decoding does.
    """

    candidates: int
    """How many of the target's likeliest tokens it wants to be told."""

    @abstractmethod
    def observe(self, tokens: Tensor, likeliest: Likeliest) -> None:
        """The next n tokens of the text `[n]` int64, and what the target found likely after each of them."""

    @abstractmethod
    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """See `Proposer.propose`."""

    @abstractmethod
    def sample(self, sequence: Tensor, aux: Tensor, lookahead: int, sampling: Sampling) -> Proposals:
        """See `Proposer.sample`."""


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


class ProposalSource(Protocol):
    """All that decoding needs of a draft or a training-free baseline."""

    def proposers(self, count: int) -> BatchProposer:
        """Fresh proposers for so many texts."""
        ...


class RolloutSource(ProposalSource, Protocol):
    """A source whose proposals depend on tokens and target features alone."""

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Proposals from every position of one sequence at once, equal to what a proposer would say there.

        Args:
            tokens: `[T + 1]` int64.
            aux: `[T, K*H]` target features of positions 0..T-1.
            lookahead: number of tokens proposed from each position.

        Returns:
            `[T, lookahead]` int64; row i is proposed when `tokens[: i + 2]` are emitted, so its first token
            stands for position i + 2.
        """
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
