"""The reference speculative decoder: a chain, greedy, batch 1. The specification that engines are compared with.

Runs in benchmarks. Chain verification is that of Leviathan et al. (arXiv 2211.17192) at temperature 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.decoding.counts import Counts, end_of, ended
from models.decoding.plain import Prefill, prefill
from models.drafts.base import ProposalSource
from models.targets.model import TargetModel

NO_PROPOSAL = -1
"""Stands where a source has nothing to propose; neither it nor anything after it is verified or accepted."""


@dataclass(frozen=True)
class Decoded:
    """A continuation and how it came about."""

    tokens: tuple[int, ...]
    """The prefill token first; end of text included."""
    counts: Counts
    forwards: int
    """Target forwards after the prefill, the one of a cut step included."""


def speculate(
    target: TargetModel,
    source: ProposalSource,
    prompt: Sequence[int],
    lookahead: int,
    max_new_tokens: int,
    eos_ids: frozenset[int],
) -> Decoded:
    """Continue `prompt` by at most `max_new_tokens` tokens, exactly as the target alone would."""
    return decode_speculatively(target, source, prefill(target, prompt), lookahead, max_new_tokens, eos_ids)


@torch.no_grad()
def decode_speculatively(
    target: TargetModel,
    source: ProposalSource,
    start: Prefill,
    lookahead: int,
    max_new_tokens: int,
    eos_ids: frozenset[int],
) -> Decoded:
    """One target forward per verification step, over the last token and its proposals."""
    if lookahead < 1:
        raise ValueError(f"lookahead {lookahead}: propose at least one token per step")
    proposer = source.proposer()
    tokens, aux = [start.token], start.aux
    accepted: list[int] = []
    cut = 0
    while not ended(tokens, max_new_tokens, eos_ids):
        sequence = torch.tensor([*start.prompt, *tokens], device=target.device)
        proposals = _usable(proposer.propose(sequence, aux, lookahead))
        assert len(proposals) <= lookahead
        choices, states = _verify(target, start, tokens[-1], proposals)
        count = _agreeing(proposals, choices)
        aux = states[: count + 1]
        # The cache has taken in every proposal; a rejected one must leave no trace.
        start.cache.crop(count - len(proposals))
        emitted = choices[: count + 1]
        kept = end_of(emitted[: max_new_tokens - len(tokens)], eos_ids)
        tokens += kept
        if len(kept) == len(emitted):
            accepted.append(count)
        else:
            cut += 1
    return Decoded(tuple(tokens), Counts(lookahead, tuple(accepted), cut), len(accepted) + cut)


def _verify(target: TargetModel, start: Prefill, last: int, proposals: list[int]) -> tuple[list[int], Tensor]:
    """The target's choices after the last token and after each proposal, and their features `[n + 1, K*H]`."""
    states = target.forward(torch.tensor([[last, *proposals]], device=target.device), start.cache)
    return target.logits(states.last[0]).argmax(-1).tolist(), states.aux[0]


def _usable(proposals: Tensor) -> list[int]:
    tokens = proposals.tolist()
    return tokens[: tokens.index(NO_PROPOSAL)] if NO_PROPOSAL in tokens else tokens


def _agreeing(proposals: list[int], choices: list[int]) -> int:
    for index, proposal in enumerate(proposals):
        if proposal != choices[index]:
            return index
    return len(proposals)
