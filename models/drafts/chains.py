"""Training of drafts that propose chains: which predictions count, their loss, and how far chains would be accepted.

Row i of a packed sequence has the target's features of position i; its step s predicts token i + 2 + s, that is the
next token of position p = i + 1 + s.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from models.drafts.base import DraftLoss, PackedSamples, TargetProjection, supervised_positions
from models.drafts.transfer import to_device
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import chunked_loss
from models.losses.divergences import MixedLoss, chosen_divergence


class ChainDraft(Protocol):
    """What the loss of chains needs of a draft."""

    config: Any
    """A `LossChoice` with `step_weights`, one for each of the S steps."""
    vocabulary: DraftVocabulary
    target_ids: Tensor
    """The vocabulary's, on the head's device."""
    lm_head: Any
    """Its `weight` is the draft head `[Vd, h]`."""


def chain_loss(
    draft: ChainDraft,
    outputs: Iterable[Tensor],
    batch: PackedSamples,
    target: TargetProjection,
    total: int,
    chunk_tokens: int,
    *,
    own_tokens: bool = False,
) -> DraftLoss:
    """Loss and counts of a packed batch of N tokens; see `Draft.loss`.

    Args:
        draft: what is trained.
        outputs: S hidden states `[N, h]` (after the draft's norm), step s's prediction from every row.
        batch: captured samples.
        target: the target's head.
        total: see `Draft.loss`.
        chunk_tokens: see `Draft.loss`.
        own_tokens: the loss is the cross-entropy of the text's own tokens, in place of the configured divergence; for
            the whole vocabulary.
    """
    head, vocabulary = draft.lm_head.weight, draft.vocabulary
    positions, rows, places, states = _predictions(batch, len(draft.config.step_weights))
    known, inside = can_propose(batch, positions, states, vocabulary), places >= 0
    kept = known.nonzero().squeeze(-1)
    weights = (torch.tensor(draft.config.step_weights) * inside / total)[kept]
    given = [rows, kept, places[kept].clamp(min=0), weights, states[kept]]
    if own_tokens:
        assert vocabulary.whole
        given.append(batch.tokens[positions[kept] + 1])
    # Of ranks that share a sample, the one that proposes a position first counts it.
    counted = inside[:, 0]
    supervised, covered = int(counted.sum()), int((known & counted).sum())
    rows, kept, places, weights, states, *own = to_device(given, head.device)
    hidden = _gathered(outputs, places)
    distribution = target.distribution(batch.last[states], draft.vocabulary.whole, draft.target_ids)
    divergence = chosen_divergence(draft.config)
    if own_tokens:
        distribution, divergence = replace(distribution, labels=own[0]), MixedLoss(1.0, 0.0, 0.0)
    found = chunked_loss(hidden, head, weights, distribution, divergence, chunk_tokens, overwrite=True)
    correct = found.correct.new_zeros(rows.shape).index_copy_(0, kept, found.correct)
    accepted, tried = _accepted_chains(rows, correct, len(batch.tokens))
    return DraftLoss(found.loss, accepted, tried, supervised, covered)


def _predictions(batch: PackedSamples, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a packed batch of N tokens is asked for; everything on the host.

    Returns:
        positions: `[P]` packed positions whose next token any row here predicts.
        rows: `[P, S]` the packed row of every step's prediction; N where there is none.
        places: `[P, S]` its index in the outputs; -1 where there is none.
        states: `[P]` index of each position's last state.
    """
    positions = supervised_positions(batch.loss_mask, batch.lengths)
    lengths = torch.tensor(batch.lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    rows = positions[:, None] - 1 - torch.arange(steps)
    # A step's row must lie in the same sample.
    inside = rows >= starts[positions][:, None]
    places, states = rows, positions
    if batch.share is not None:
        # Only positions that any row of this rank predicts; rows of other ranks may stand anywhere in the outputs.
        places = batch.share.row_index(rows.device)[rows.clamp(min=0)]
        inside &= places >= 0
        here = inside.any(-1)
        positions, rows, inside, places = positions[here], rows[here], inside[here], places[here]
        states = batch.share.state_index(rows.device)[positions]
    return positions, rows.where(inside, len(batch.tokens)), places.where(inside, -1), states


def _gathered(outputs: Iterable[Tensor], rows: Tensor) -> list[Tensor]:
    """S times `[P, h]`: copies of each step's rows `[P, S]`, in autocast's dtype, so that the outputs can be freed."""
    device = rows.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return [(x if low is None else x.to(low))[rows[:, step]] for step, x in enumerate(outputs)]


def can_propose(batch: PackedSamples, positions: Tensor, states: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """`[P]` bool: the target's own next token can be proposed; without it the text's."""
    if vocabulary.whole:
        return torch.ones_like(positions, dtype=torch.bool)
    decisive = batch.tokens[positions + 1] if batch.top is None else batch.top[states]
    return vocabulary.t2d[decisive]


def _accepted_chains(rows: Tensor, correct: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Accepted and tried chains `[S]`: row r's chain goes on to step j only if steps 0..j-1 were correct.

    `rows` `[P, S]` of `count` rows; `count` stands for none. No index depends on a count that the host must know.
    """
    alive = torch.ones(count + 1, dtype=torch.bool, device=rows.device)
    accepted, tried = [], []
    for row, hit in zip(rows.T, correct.T, strict=True):
        alive[count] = False
        reached = alive[row]
        going_on = reached & hit
        tried.append(reached.sum())
        accepted.append(going_on.sum())
        alive = torch.zeros_like(alive).index_fill_(0, row.where(going_on, count), True)
    return torch.stack(accepted), torch.stack(tried)
