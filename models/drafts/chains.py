"""Training of drafts that propose chains: which predictions count, their loss, and how far chains would be accepted.

Row i of a packed sequence has the target's features of position i; its step s predicts token i + 2 + s, that is the
next token of position p = i + 1 + s. Runs in trainer ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.drafts.base import DraftLoss, PackedSamples, TargetProjection, supervised_positions
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import Divergence, TargetDistribution, chunked_loss, shape_logits


@dataclass(frozen=True)
class Objective:
    """What a method minimises."""

    step_weights: Sequence[float]
    divergence: Divergence


def chain_loss(
    outputs: Sequence[Tensor],
    head: Tensor,
    batch: PackedSamples,
    target: TargetProjection,
    vocabulary: DraftVocabulary,
    objective: Objective,
    *,
    total: int,
    chunk_tokens: int,
) -> DraftLoss:
    """Loss and counts of a packed batch.

    Args:
        outputs: S hidden states `[N, h]` (after the draft's norm): step s's prediction from every row.
        head: `[Vd, h]` draft head.
        batch: captured samples, N tokens.
        target: the target's head.
        vocabulary: which target tokens the draft proposes.
        objective: weights of the S steps, and the divergence.
        total: see `Draft.loss`.
        chunk_tokens: see `Draft.loss`.
    """
    device, divergence = head.device, objective.divergence
    positions = supervised_positions(batch.loss_mask, batch.lengths)
    starts = torch.cat([positions.new_full((n,), sum(batch.lengths[:i])) for i, n in enumerate(batch.lengths)])
    rows = positions - 1 - torch.arange(len(outputs), device=device)[:, None]
    # A step's row must lie in the same sample.
    valid = rows >= starts[positions]
    rows = rows.clamp(min=0)
    covered, log_norm = _expressible(batch, positions, target, vocabulary, divergence.true_mass, chunk_tokens)
    distribution = TargetDistribution(batch.last[positions], target.rows, target.logit_scale, target.soft_cap, log_norm)
    weights = torch.tensor(objective.step_weights, device=device)[:, None] * (valid & covered) / total
    hidden = torch.stack([output[row] for output, row in zip(outputs, rows, strict=True)])
    if torch.is_autocast_enabled(device.type):
        hidden = hidden.to(torch.get_autocast_dtype(device.type))
    loss, correct = chunked_loss(hidden, head, weights, distribution, divergence, chunk_tokens)
    accepted, tried = _accepted_chains(rows, valid, correct & covered, len(batch.tokens))
    return DraftLoss(loss, accepted, tried, torch.tensor(len(positions)), covered.sum())


def _expressible(
    batch: PackedSamples,
    positions: Tensor,
    target: TargetProjection,
    vocabulary: DraftVocabulary,
    with_norm: bool,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """`[P]` bool: the position's decisive token (the target's argmax, or the text's own) can be proposed.

    With it, if asked for and known, `[P]` the log-normaliser of the target's whole distribution.
    """
    if vocabulary.whole:
        return torch.ones_like(positions, dtype=torch.bool), None
    known = vocabulary.t2d.to(positions.device)
    if target.full is None:
        return known[batch.tokens[positions + 1]], None
    best, norms = [known.new_zeros(0, dtype=torch.long)], [batch.last.new_zeros(0, dtype=torch.float)]
    for last in batch.last[positions].split(chunk):
        logits = last.to(target.full.dtype) @ target.full.T
        best.append(logits.argmax(-1))
        if with_norm:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            norms.append(shape_logits(wide, target.logit_scale, target.soft_cap).logsumexp(-1))
    return known[torch.cat(best)], torch.cat(norms) if with_norm else None


def _accepted_chains(rows: Tensor, valid: Tensor, correct: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Accepted and tried chains `[S]`: row r's chain goes on to step j only if steps 0..j-1 were correct."""
    alive = torch.ones(count, dtype=torch.bool, device=rows.device)
    accepted, tried = [], []
    for row, here, hit in zip(rows, valid, correct, strict=True):
        reached = here & alive[row]
        tried.append(reached.sum())
        accepted.append((reached & hit).sum())
        alive = torch.zeros_like(alive).index_put((row[reached & hit],), alive.new_ones(()))
    return torch.stack(accepted), torch.stack(tried)
