"""What every draft method offers: a training loss, proposals while decoding, and a rollout from every position."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from models.drafts.context import ContextShare
from models.drafts.sampling import Sampling
from models.drafts.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from models.drafts.together import BatchProposer

NO_PROPOSAL = -1
"""Stands where a source has nothing to propose; neither it nor anything after it is verified or accepted."""


@dataclass(frozen=True)
class Proposals:
    """k proposed tokens and what they were drawn from."""

    tokens: Tensor
    """`[k]` int64, target-vocabulary ids."""
    probabilities: Tensor | None
    """`[k, V]` over the target's vocabulary, row i given the proposals before it: at most 7 MB for a lookahead of 7
    and 262,144 tokens in float32. None: proposed with certainty."""

    def usable(self) -> "Proposals":
        """Those before the first `NO_PROPOSAL`."""
        tokens = self.tokens.tolist()
        if NO_PROPOSAL not in tokens:
            return self
        count = tokens.index(NO_PROPOSAL)
        return Proposals(self.tokens[:count], None if self.probabilities is None else self.probabilities[:count])

    def over(self, vocabulary: int) -> Tensor:
        """`[k, V]` the distributions, written out where they are certain; every token is a real one."""
        if self.probabilities is None:
            certain = torch.zeros(len(self.tokens), vocabulary, device=self.tokens.device)
            return certain.scatter_(1, self.tokens.unsqueeze(-1), 1.0)
        assert self.probabilities.shape == (len(self.tokens), vocabulary)
        return self.probabilities


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


class Source(Protocol):
    """All that decoding needs of a draft or a training-free baseline."""

    def proposers(self, count: int) -> "BatchProposer":
        """Fresh proposers for so many texts."""
        ...


class ProposalSource(Source, Protocol):
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


@dataclass(frozen=True)
class Likeliest:
    """The target's k likeliest next tokens after n positions, best first."""

    tokens: Tensor
    """`[n, k]` int64."""
    log_probabilities: Tensor
    """`[n, k]` float32, over the whole vocabulary."""

    def __getitem__(self, rows: slice) -> "Likeliest":
        return Likeliest(self.tokens[rows], self.log_probabilities[rows])


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


@dataclass(frozen=True)
class PackedSamples:
    """Captured samples, one behind the other. N is the sum of `lengths`."""

    tokens: Tensor
    """`[N]` int64."""
    loss_mask: Tensor
    """`[N]` bool: the token is one that the target would generate."""
    aux: Tensor
    """`[N, K*H]` target features; with a `share`, of its rows alone."""
    last: Tensor
    """`[N, H]` target hidden states after the final norm; with a `share`, of its states alone."""
    lengths: tuple[int, ...]
    share: ContextShare | None = None
    """Which rows are computed here, where ranks share samples. None: all."""


@dataclass(frozen=True)
class TargetProjection:
    """The part of the target's head that training needs."""

    rows: Tensor
    """`[Vd, H]` the head's rows of the draft vocabulary."""
    full: Tensor | None
    """`[V, H]` the whole head, where supervision is decided by the target's argmax; None: by the text's own token."""
    logit_scale: float
    soft_cap: float | None


class DraftLoss(NamedTuple):
    """A micro-batch's share of an optimizer step's loss, and its counts. S is the number of proposed positions."""

    loss: Tensor
    """Scalar: sum over supervised positions / the step's total of supervised positions."""
    accepted: Tensor
    """`[S]` positions at which proposals 1..s all equal the target's greatest."""
    tried: Tensor
    """`[S]` positions at which proposals 1..s-1 were all accepted."""
    supervised: Tensor
    """Scalar count of supervised positions."""
    covered: Tensor
    """Scalar count of those that the draft vocabulary can express."""


class Draft(torch.nn.Module):
    """A draft model. Subclasses are `models/drafts/<method>/module.py`.

    Parameters have the names that SGLang and speculators give them, where they have the method: the export stores them
    as they are.
    """

    config: Any
    aux_layer_ids: tuple[int, ...]
    vocabulary: DraftVocabulary

    recompute: bool = False
    """Training keeps what passes from step to step and computes the rest again in the backward pass: less memory, more
    arithmetic. Methods without such steps have nothing to compute again."""

    @property
    def positions(self) -> int:
        """S: proposed positions that training counts."""
        raise NotImplementedError

    def start_from(self, head: Tensor) -> None:
        """Take what an untrained draft can from the target's head `[V, H]`, and what no draft of the method stores.

        Comes before stored weights are loaded.
        """
        raise NotImplementedError

    def engine_config(self) -> dict[str, Any] | None:
        """What SGLang's `config.json` says of this draft; None where SGLang does not serve it."""
        raise NotImplementedError

    def speculators_config(self) -> dict[str, Any] | None:
        """What `config.json` says of this draft to vLLM and the package `speculators`, beside `engine_config`.

        A key that both have means the same in both, but for `architectures`. None where they have no such draft.
        """
        raise NotImplementedError

    def loss(self, batch: PackedSamples, target: TargetProjection, total: int, chunk_tokens: int) -> DraftLoss:
        """Training loss of one micro-batch.

        Args:
            batch: captured samples.
            target: the target's head.
            total: supervised positions of the whole optimizer step, over all ranks and micro-batches.
            chunk_tokens: positions whose logits may be alive at once.
        """
        raise NotImplementedError

    def no_loss(self) -> Tensor:
        """The loss of a rank that has no sample: 0, and every parameter has a part in it, as gradients are reduced."""
        return torch.stack([parameter.sum() * 0.0 for parameter in self.parameters()]).sum()

    def proposers(self, count: int) -> "BatchProposer":
        raise NotImplementedError

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        raise NotImplementedError


def supervised_positions(loss_mask: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Packed positions `[P]` whose next token is supervised and can be predicted by a draft.

    Position t of a sample is one when t >= 1 (a draft predicts it from position t - 1) and token t + 1 is supervised.
    """
    keep = torch.zeros(len(loss_mask), dtype=torch.bool, device=loss_mask.device)
    start = 0
    for length in lengths:
        end = start + length
        keep[start + 1 : end - 1] = loss_mask[start + 2 : end]
        start = end
    return keep.nonzero().squeeze(-1)
