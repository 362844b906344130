"""Soft cross-entropy of a draft against the target's distribution.

EAGLE-3's loss (arXiv 2503.01840): the target's distribution, restricted to the draft vocabulary and renormalised, for
every step of the training-time test. Its gradient is that of KL(p || q).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.losses.chunked import SummedLoss, TargetDistribution, chunked_loss


@dataclass(frozen=True)
class SoftCrossEntropy:
    """`-sum_v p(v) log q(v)` (see `models.losses.chunked.Divergence`)."""

    true_mass: bool = False

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, with_slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        p = log_p.exp()
        dots = torch.einsum("nsv,nv->ns", logits, p)
        greatest = logits.amax(-1)
        q = logits.softmax(-1)
        # The log-normaliser, at the greatest logit: log q = z - log_norm. And sum p log q = sum p z - log_norm.
        values = greatest - q.amax(-1).log() - dots
        return values, q.sub_(p.unsqueeze(1)) if with_slope else None


def soft_cross_entropy(
    hidden: Sequence[Tensor], head: Tensor, weights: Tensor, target: TargetDistribution, chunk_tokens: int
) -> SummedLoss:
    """Weighted sum of soft cross-entropies, and which predictions are right: see `chunked_loss`."""
    return chunked_loss(hidden, head, weights, target, SoftCrossEntropy(), chunk_tokens)
