"""The reference speculative decoder: a chain, batch 1, greedy or sampled. The specification for engines.

Runs in benchmarks. Greedy text is token for token the target's own; sampled text follows the target's distribution
after temperature and top-p (see `models.decoding.rejection`), in which the draft proposes by sampling from its own
distribution after the same temperature and top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from models.decoding.counts import Counts, end_of, ended
from models.decoding.plain import Prefill, prefill
from models.decoding.rejection import accept
from models.decoding.sampling import GREEDY, Sampling
from models.drafts.base import NO_PROPOSAL, Proposals, ProposalSource
from models.targets.model import TargetModel


@dataclass(frozen=True)
class Decoded:
    """A continuation and how it came about."""

    tokens: tuple[int, ...]
    """The prefill token first; end of text included."""
    counts: Counts
    forwards: int
    """Target forwards after the prefill, the one of a cut step included."""


@dataclass(frozen=True)
class Verification:
    """n proposals, and the target's logits `[n + 1, V]` at their places and after the last."""

    proposals: Proposals
    logits: Tensor


def speculate(
    target: TargetModel,
    source: ProposalSource,
    prompt: Sequence[int],
    lookahead: int,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    *,
    sampling: Sampling = GREEDY,
) -> Decoded:
    """Continue `prompt` by at most `max_new_tokens` tokens, exactly as the target alone would."""
    start = prefill(target, prompt, sampling)
    return decode_speculatively(target, source, start, lookahead, max_new_tokens, eos_ids, sampling=sampling)


def decode_speculatively(
    target: TargetModel,
    source: ProposalSource,
    start: Prefill,
    lookahead: int,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    *,
    sampling: Sampling = GREEDY,
) -> Decoded:
    """One target forward per verification step; `start`'s token was chosen by the same `sampling`."""
    conversation = Conversation(target, source, start, lookahead, max_new_tokens, eos_ids, sampling=sampling)
    decode_side_by_side([conversation], sampling)
    return conversation.decoded()


@torch.no_grad()
def decode_side_by_side(conversations: Sequence["Conversation"], sampling: Sampling) -> None:
    """Decode to the end: each conversation by forwards of its own, their verification steps decided together."""
    while going := [conversation for conversation in conversations if not conversation.over]:
        steps = [conversation.verify() for conversation in going]
        emitted = [_agree(step) for step in steps] if sampling.greedy else _sample(steps, sampling)
        for conversation, tokens in zip(going, emitted, strict=True):
            conversation.take(tokens)


class Conversation:
    """One text while it is decoded: `verify` and `take` take turns until it is `over`."""

    def __init__(
        self,
        target: TargetModel,
        source: ProposalSource,
        start: Prefill,
        lookahead: int,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        *,
        sampling: Sampling,
    ):
        if lookahead < 1:
            raise ValueError(f"lookahead {lookahead}: propose at least one token per step")
        self.target, self.proposer, self.start, self.sampling = target, source.proposer(), start, sampling
        self.lookahead, self.max_new_tokens, self.eos_ids = lookahead, max_new_tokens, eos_ids
        self.tokens, self.aux = [start.token], start.aux
        self.accepted: list[int] = []
        self.cut = 0

    @property
    def over(self) -> bool:
        return ended(self.tokens, self.max_new_tokens, self.eos_ids)

    def verify(self) -> Verification:
        """One target forward over the last token and its proposals."""
        sequence = torch.tensor([*self.start.prompt, *self.tokens], device=self.target.device)
        if self.sampling.greedy:
            proposals = Proposals(self.proposer.propose(sequence, self.aux, self.lookahead), None)
        else:
            proposals = self.proposer.sample(sequence, self.aux, self.lookahead, self.sampling)
        assert len(proposals.tokens) <= self.lookahead
        usable = proposals.usable()
        tokens = torch.cat([sequence[-1:], usable.tokens]).unsqueeze(0)
        states = self.target.forward(tokens, self.start.cache)
        self.aux = states.aux[0]
        return Verification(usable, self.target.logits(states.last[0]))

    def take(self, emitted: list[int]) -> None:
        """Go on with what the verification step emitted: accepted proposals and the token that closes the step."""
        count = len(emitted) - 1
        # The cache has taken in every proposal; a rejected one must leave no trace.
        self.start.cache.crop(count + 1 - len(self.aux))
        self.aux = self.aux[: count + 1]
        kept = end_of(emitted[: self.max_new_tokens - len(self.tokens)], self.eos_ids)
        self.tokens += kept
        if len(kept) == len(emitted):
            self.accepted.append(count)
        else:
            self.cut += 1

    def decoded(self) -> Decoded:
        counts = Counts(self.lookahead, tuple(self.accepted), self.cut)
        return Decoded(tuple(self.tokens), counts, counts.steps + counts.cut)


def _agree(step: Verification) -> list[int]:
    """What a greedy step emits: proposals that are the target's own choices, and its choice after them."""
    choices = step.logits.argmax(-1).tolist()
    proposals = step.proposals.tokens.tolist()
    count = next((i for i, proposal in enumerate(proposals) if proposal != choices[i]), len(proposals))
    return choices[: count + 1]


def _sample(steps: Sequence[Verification], sampling: Sampling) -> list[list[int]]:
    """What sampled steps emit, each row decided by itself; steps with fewer proposals are padded with none."""
    logits = pad_sequence([step.logits for step in steps], batch_first=True)
    tokens = pad_sequence([step.proposals.tokens for step in steps], batch_first=True, padding_value=NO_PROPOSAL)
    q = pad_sequence([step.proposals.over(logits.shape[-1]) for step in steps], batch_first=True)
    tokens, q = functional.pad(tokens, (0, 1), value=NO_PROPOSAL), functional.pad(q, (0, 0, 0, 1))
    accepted, closing = accept(sampling.distribution(logits), tokens, q, sampling)
    decided = zip(tokens.tolist(), accepted.tolist(), closing.tolist(), strict=True)
    return [[*proposed[:count], last] for proposed, count, last in decided]
