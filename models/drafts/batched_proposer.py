"""The contract of everything that proposes tokens: batched; a single text is a batch of one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from models.drafts.sampling import Sampling, chances, draw_by
from models.drafts.trees import ROOT, DynamicTree, Proposals, Tree


@dataclass(frozen=True)
class Turn:
    """One text's inputs to a decoding step."""

    text: Sequence[int]
    """All t + 1 tokens emitted so far; the target has not processed the last one."""
    aux: Tensor
    """`[n, K*H]` target features of positions `t - n .. t - 1`, those that no earlier turn had; n >= 1."""
    shape: int | DynamicTree
    """Length of a chain of proposals (at least 1), or a tree."""
    sampling: Sampling


class Proposer(Protocol):
    """Proposes for B texts, row by row, and holds the draft's caches."""

    branches: bool
    """Whether it can propose trees."""
    candidates: int
    """How many of the target's most likely tokens `observe` takes per position; 0 if it observes nothing."""

    @property
    def confidences(self) -> Tensor | None:
        """Of the newest chains of all rows: logits `[B, s]` of the chance that each proposal is accepted if those
        before it are.

        They depend on the proposals before, never on the proposal itself. None: not told.
        """
        ...

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """Propose what the next step of these rows verifies; other rows keep their pending inputs.

        All turns have the same temperature, top-k and top-p; each row draws from its own generator (see
        `Sampling.drafted`). Greedy turns get the most likely tokens. A dynamic tree keeps what is likely, so its tokens
        cannot be draws: sampled turns, too, get it proposed with certainty, which is as exact.
        """
        ...

    def observe(self, row: int, tokens: Tensor, likeliest: Tensor) -> None:
        """Take the next tokens `[n]` int64 of a row's text, and the target's most likely ones `[n, candidates]` int64
        after each, best first.

        Every position of the text comes once, in order, before the proposals that follow it. Rejected proposals are no
        positions of the text. So proposals depend on the text alone, and a walk over a finished text meets the same
        proposals as decoding does.
        """
        ...

    def only(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        ...


class ChangedTurns:
    """Another proposer, with turns that are changed before it gets them."""

    def __init__(self, batch: Proposer, change: Callable[[Turn], Turn]):
        self.batch, self.change = batch, change
        self.branches, self.candidates = batch.branches, batch.candidates

    @property
    def confidences(self) -> Tensor | None:
        return self.batch.confidences

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        return self.batch.propose({row: self.change(turn) for row, turn in turns.items()})

    def observe(self, row: int, tokens: Tensor, likeliest: Tensor) -> None:
        self.batch.observe(row, tokens, likeliest)

    def only(self, rows: Sequence[int]) -> None:
        self.batch.only(rows)


class DraftProposer:
    """The part of a draft's proposer that is the same for every method."""

    branches, candidates = False, 0
    confidences: Tensor | None = None

    def observe(self, row: int, tokens: Tensor, likeliest: Tensor) -> None:
        raise AssertionError("a draft observes nothing")


class ProposalSource(Protocol):
    """A draft, or a baseline that needs no training."""

    def proposers(self, count: int) -> Proposer:
        """A fresh proposer for `count` texts."""
        ...


@runtime_checkable
class RolloutSource(ProposalSource, Protocol):
    """A source whose proposals depend on tokens and target features alone."""

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        """Proposals from every position of one text at once, equal to a proposer's.

        Args:
            tokens: `[T + 1]` int64.
            aux: `[T, K*H]` target features of positions 0..T-1.
            lookahead: number of tokens proposed from each position.
            first: the first position that is proposed from, less than T; of those before it no logits are computed.

        Returns:
            `[T - first, lookahead]` int64; the row of position i is proposed after `tokens[: i + 2]`, so its first
            token is for position i + 2.
        """
        ...


class ImageRows(NamedTuple):
    """What rows read of images."""

    embedded: Tensor
    """`[M, H]` embeddings that the target read; a row embeds one of them by a number from V on, the vocabulary's size.
    """
    places: Tensor
    """`[N, 3]` int32, where the rows stand in time, height and width."""


def shown_in(prompt: Sequence[int], continuation: Sequence[int], media_ids: Tensor) -> Tensor:
    """`[P + N]` bool: the token stands for a part of an image. In what a target said it is a word like any other."""
    return torch.cat([torch.isin(torch.tensor(prompt), media_ids), torch.zeros(len(continuation), dtype=torch.bool)])


@dataclass(frozen=True)
class PackedTexts:
    """Texts of T + 1 tokens each, a row for each token but the last, concatenated; N is the number of rows."""

    following: Tensor
    """`[N]` int64, the token after each row's own."""
    aux: Tensor
    """`[N, K*H]` target features."""
    lengths: tuple[int, ...]
    """T of each text."""
    images: ImageRows | None = None
    """What the rows read of images."""

    @classmethod
    def of(cls, following: Sequence[Tensor], aux: Sequence[Tensor]) -> "PackedTexts":
        """Concatenate texts."""
        return cls(torch.cat(list(following)), torch.cat(list(aux)), tuple(map(len, following)))

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """`[N]` int64 each: the row's position in its text, and how many of its text's rows come after it."""
        places = torch.cat([torch.arange(length) for length in self.lengths])
        after = torch.cat([torch.arange(length).flip(0) for length in self.lengths])
        return places.to(self.aux.device), after.to(self.aux.device)


@dataclass(frozen=True)
class Along:
    """What a draft says of texts, from n of its positions, L tokens each; see `DrawingSource.along`."""

    chances: Tensor
    """`[n, L]` float32: its probability of the text's token, see `Sampling.drafted`; 0 beyond the text."""
    likeliest: Tensor
    """`[n, L]` bool: the text's token is its most likely one."""


@runtime_checkable
class DrawingSource(RolloutSource, Protocol):
    """A source with a distribution: what it says of a text's own tokens, in place of its own proposals."""

    def along(self, texts: PackedTexts, lookahead: int, rows: Tensor, sampling: Sampling) -> Along:
        """Follow texts from many positions at once, as steps do whose proposals are all accepted.

        Args:
            texts: all texts.
            lookahead: L, tokens from each position.
            rows: `[n]` int64, the wanted ones, ascending; proposals of a row begin after the token that follows it.
            sampling: how the texts are sampled; not greedy.

        Returns:
            A row for each wanted one; column j is what follows if the j tokens of the text before it were proposed.
        """
        ...


@runtime_checkable
class BranchingSource(DrawingSource, Protocol):
    """A source whose dynamic trees an engine can serve."""

    def ranks_along(self, texts: PackedTexts, rows: Tensor, topk: int, depth: int) -> Tensor:
        """Where the text's own tokens stand in dynamic trees that grow from many positions of finished texts.

        Args:
            texts: all texts.
            rows: `[n]` int64, the wanted ones, ascending, of each text one after the other; trees of a row grow after
                the token that follows it.
            topk: places of each depth that get children, and how many each.
            depth: D, of the deepest tree.

        Returns:
            `[n, D, D]` int64. In trees of depth d + 1, the text's own token j + 1 has rank `[:, d, j]` among all
            places, the likeliest path first: trees that keep more tokens hold it. `ABSENT` where none does.
        """
        ...


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
            self._drawn_from.append(self.sampling.drafted(logits))
            found = draw_by(self._drawn_from[-1], self._chances[:, len(self._tokens)])
        self._tokens.append(self.target_ids[found])
        return self._tokens[-1]

    def chains(self) -> list[Tree]:
        """The chain of every row, with its distributions over the target's vocabulary."""
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
