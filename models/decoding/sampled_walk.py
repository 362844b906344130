"""Acceptance over text that the target sampled, at every lookahead, from one forward: speculative sampling's law.

A token x drawn from q is proposed and accepted with probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)), and x is
emitted with probability p(x), by whichever way. Given that x was emitted it came by acceptance with probability
min(1, q(x) / p(x)), independently of the other positions: p is after temperature, top-k and top-p, q after temperature
alone, given that the proposals before it are the text. So steps of length n walk over a finished text as a Markov chain
over the places where they start. Its expectation is computed, place by place, in place of one draw. A step that accepts
all that is left of a text ends with it, or is cut by the maximum length, as in decoding.

Proposals with certainty, the likeliest token for instance, are accepted where they equal the text
(`models.decoding.simulated`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.decoding.acceptance import AcceptedCounts, ExpectedCounts
from models.decoding.simulated import TextReading, walk_chain
from models.drafts.batched_proposer import DrawingSource, PackedTexts
from models.drafts.sampling import Sampling


@dataclass(frozen=True)
class SampledWalk:
    """Counts at lookahead 1..L over one sampled text, by the rule by which the draft proposes."""

    greedy: tuple[AcceptedCounts, ...]
    """The likeliest tokens."""
    drawn: tuple[ExpectedCounts, ...]
    """Tokens drawn from its distribution, after the target's temperature."""


@torch.no_grad()
def walk_sampled(
    source: DrawingSource,
    readings: Sequence[TextReading],
    max_lookahead: int,
    sampling: Sampling,
    *,
    eos_ids: frozenset[int],
) -> list[SampledWalk]:
    """Walk over texts that the target sampled with `sampling`, all at once; each starts after its prefill token.

    One whose last token is not of `eos_ids` was cut by the maximum length.
    """
    device = readings[0].aux.device
    packed = PackedTexts.of([reading.following for reading in readings], [reading.aux for reading in readings])
    rows, lookaheads = [len(reading.chances) for reading in readings], range(1, max_lookahead + 1)
    # The last token's row has nothing after it.
    wanted = [torch.arange(end - 1 - n, end - 1) for end, n in zip(np.cumsum(packed.lengths), rows, strict=True)]
    along = source.along(packed, max_lookahead, torch.cat(wanted).to(device), sampling)
    # Nothing is proposed beyond a text, whatever stands there.
    padded = [F.pad(reading.chances, (0, max_lookahead), value=1.0) for reading in readings]
    emitted = torch.cat([each.unfold(0, max_lookahead, 1)[:-1] for each in padded])
    accepted = acceptance_chances(along.chances, emitted).cpu()
    agreeing = along.likeliest.cumprod(dim=1).sum(dim=1).cpu().split(rows)
    ended = [int(reading.following[-1]) in eos_ids for reading in readings]
    drawn = expected_counts([part.numpy() for part in accepted.split(rows)], max_lookahead, ended)
    return [
        SampledWalk(tuple(walk_chain(equal.tolist(), lookahead, ended=own) for lookahead in lookaheads), expected)
        for equal, expected, own in zip(agreeing, drawn, ended, strict=True)
    ]


def acceptance_chances(q: Tensor, p: Tensor) -> Tensor:
    """The chance, float64, that a token came by acceptance, given that it was emitted; from its probabilities."""
    return (q.double() / p.double()).nan_to_num(0).clamp(max=1)


def expected_counts(
    accepted: Sequence[NDArray[np.float64]], most: int, ended: Sequence[bool]
) -> list[tuple[ExpectedCounts, ...]]:
    """Expected counts of steps of lookahead 1..`most`, of texts of R + 1 tokens each.

    Args:
        accepted: of each text `[R, most]`, the chance that a step after token r accepts its proposal j, for token
            r + j + 1, if it accepted those before; 0 beyond the text.
        most: largest lookahead.
        ended: of each text, whether its last token ends it; otherwise the maximum length cut it.
    """
    lengths, texts = np.array([len(each) for each in accepted]), len(accepted)
    survived = np.zeros((texts, max(lengths), most + 2))
    for text, each in zip(survived, accepted, strict=True):
        text[: len(each), 0], text[: len(each), 1 : most + 1] = 1.0, each.cumprod(axis=1)
    lookaheads, numbers = np.arange(1, most + 1)[:, None], np.arange(most + 1)
    starts = np.zeros((texts, most, max(lengths) + most + 1))
    counts, last = np.zeros((2, texts, most, most + 1))
    starts[:, :, 0] = 1.0
    for row in range(max(lengths)):
        reached, after = survived[:, row, None, :-1], survived[:, row, None, 1:]
        # Probability that a step accepts exactly `numbers` proposals, for each lookahead.
        here = np.where(numbers < lookaheads, reached - after, reached) * (numbers <= lookaheads)
        here = here * starts[:, :, row, None]
        whole = here * (numbers < (lengths - row)[:, None, None])
        counts += whole
        last += here - whole
        starts[:, :, row + 1 : row + most + 2] += whole

    def expected(at: int, closed: NDArray[np.float64], left: NDArray[np.float64], ends: bool) -> ExpectedCounts:
        by_accepted, others = tuple(closed[: at + 1].tolist()), tuple(left[: at + 1].tolist())
        return ExpectedCounts(at, by_accepted, 0.0 if ends else sum(others), others if ends else ())

    return [
        tuple(expected(at, closed[at - 1], left[at - 1], ends) for at in range(1, most + 1))
        for closed, left, ends in zip(counts, last, ended, strict=True)
    ]
