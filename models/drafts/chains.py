"""Training of drafts that propose chains: which predictions count, their loss, and how far chains would be accepted.

Row i of a packed sequence has the target's features of position i; its step s predicts token i + 2 + s, that is the
next token of position p = i + 1 + s.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from models.drafts.base import DraftLoss, PackedSamples, TargetProjection, supervised_positions
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import TargetDistribution, chunked_loss
from models.losses.divergences import chosen_divergence


class ChainDraft(Protocol):
    """What the loss of chains needs of a draft."""

    config: Any
    """A `LossChoice` with `step_weights`, one for each of the S steps."""
    vocabulary: DraftVocabulary
    lm_head: Any
    """Its `weight` is the draft head `[Vd, h]`."""


def chain_loss(
    draft: ChainDraft,
    outputs: Iterable[Tensor],
    batch: PackedSamples,
    target: TargetProjection,
    total: int,
    chunk_tokens: int,
) -> DraftLoss:
    """Loss and counts of a packed batch of N tokens; see `Draft.loss`.

    `outputs`: S hidden states `[N, h]` (after the draft's norm), step s's prediction from every row.
    """
    head, vocabulary, device = draft.lm_head.weight, draft.vocabulary, draft.lm_head.weight.device
    positions = supervised_positions(batch.loss_mask, batch.lengths)
    lengths = torch.tensor(batch.lengths, device=device)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    rows = positions[:, None] - 1 - torch.arange(len(draft.config.step_weights), device=device)
    # A step's row must lie in the same sample.
    valid = rows >= starts[positions][:, None]
    rows = rows.clamp(min=0)
    places, states = rows, positions
    if batch.share is not None:
        # Only positions that any row of this rank predicts; rows of other ranks may stand anywhere in the outputs.
        places = batch.share.row_index(device)[rows]
        valid = valid & (places >= 0)
        here = valid.any(-1)
        positions, rows, valid, places = positions[here], rows[here], valid[here], places[here].clamp(min=0)
        states = batch.share.state_index(device)[positions]
    known = _known(batch, positions, states, vocabulary)
    weights = torch.tensor(draft.config.step_weights, device=device) * (valid & known[:, None]) / total
    hidden = _gathered(outputs, places)
    distribution = _distribution(batch.last[states], target, vocabulary)
    divergence = chosen_divergence(draft.config)
    loss, correct, covered = chunked_loss(hidden, head, weights, distribution, divergence, chunk_tokens, overwrite=True)
    accepted, tried = _accepted_chains(rows, valid, correct & known[:, None], len(batch.tokens))
    # Of ranks that share a sample, the one that proposes a position first counts it.
    counted = valid[:, 0]
    return DraftLoss(loss, accepted, tried, counted.sum(), (covered & known & counted).sum())


def _gathered(outputs: Iterable[Tensor], rows: Tensor) -> list[Tensor]:
    """S times `[P, h]`: copies of each step's rows `[P, S]`, in autocast's dtype, so that the outputs can be freed."""
    device = rows.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return [(x if low is None else x.to(low))[rows[:, step]] for step, x in enumerate(outputs)]


def _known(batch: PackedSamples, positions: Tensor, states: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """`[P]` bool: the target's own next token can be proposed; without it the text's."""
    if vocabulary.whole:
        return torch.ones_like(positions, dtype=torch.bool)
    decisive = batch.tokens[positions + 1] if batch.top is None else batch.top[states]
    return vocabulary.t2d.to(positions.device)[decisive]


def _distribution(last: Tensor, target: TargetProjection, vocabulary: DraftVocabulary) -> TargetDistribution:
    """The target's distribution; from the whole head if the loss needs the draft vocabulary's share of it."""
    if vocabulary.whole or target.full is None:
        return TargetDistribution(last, target.rows, target.logit_scale, target.soft_cap)
    ids = vocabulary.target_ids.to(last.device)
    return TargetDistribution(last, target.full, target.logit_scale, target.soft_cap, ids)


def _accepted_chains(rows: Tensor, valid: Tensor, correct: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Accepted and tried chains `[S]`: row r's chain goes on to step j only if steps 0..j-1 were correct."""
    alive = torch.ones(count, dtype=torch.bool, device=rows.device)
    accepted, tried = [], []
    for row, here, hit in zip(rows.T, valid.T, correct.T, strict=True):
        reached = here & alive[row]
        tried.append(reached.sum())
        accepted.append((reached & hit).sum())
        alive = torch.zeros_like(alive).index_put((row[reached & hit],), alive.new_ones(()))
    return torch.stack(accepted), torch.stack(tried)
