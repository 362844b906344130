"""Soft cross-entropy of a draft against the target's distribution. Runs in trainer ranks.

EAGLE-3's loss (arXiv 2503.01840): the target's distribution, restricted to the draft vocabulary and renormalised, for
every step of the training-time test. Its gradient is that of KL(p || q).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.losses.chunked import TargetDistribution, chunked_loss


@dataclass(frozen=True)
class SoftCrossEntropy:
    """`-sum_v p(v) log q(v)` (see `models.losses.chunked.Divergence`)."""

    true_mass: bool = False

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, with_slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        p = log_p.exp()
        log_norm = logits.logsumexp(-1)
        # logsumexp(z) - sum p z, because p sums to one.
        values = log_norm - torch.einsum("spv,pv->sp", logits, p)
        return values, logits.sub_(log_norm.unsqueeze(-1)).exp_().sub_(p) if with_slope else None


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, weights: Tensor, target: TargetDistribution, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Weighted sum of soft cross-entropies, and which predictions are right: see `chunked_loss`."""
    return chunked_loss(hidden, head, weights, target, SoftCrossEntropy(), chunk_tokens)
