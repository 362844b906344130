"""Soft cross-entropy of a draft against the target's distribution, in chunks over positions.

EAGLE-3's loss (arXiv 2503.01840): the target's distribution, restricted to the draft vocabulary and renormalised, for
every step of the training-time test. Logits live for one chunk of positions at a time; the target's probabilities are
computed once per chunk and serve all steps; gradients are formed in the forward pass, so no logits are kept or redone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetDistribution:
    """What the target's probabilities at a position are computed from."""

    last: Tensor
    """`[P, H]` hidden states after the target's final norm."""
    head: Tensor
    """`[Vd, H]` the target head's rows of the draft vocabulary."""
    logit_scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, start: int, end: int) -> Tensor:
        """`[end - start, Vd]` float32 logits over the draft vocabulary."""
        logits = _product(self.last[start:end], self.head) * self.logit_scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, weights: Tensor, target: TargetDistribution, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies `-sum_v p(v) log q(v)`.

    Args:
        hidden: `[S, P, h]` draft hidden states (after its norm): step s's prediction of position p's next token.
        head: `[Vd, h]` draft head.
        weights: `[S, P]` float32; 0 leaves a position out.
        target: the target's distribution at the P positions.
        chunk_tokens: positions whose logits are alive at once.

    Returns:
        The loss (float32 scalar, differentiable in `hidden` and `head`) and `[S, P]` bool: whether the draft's
        greatest logit is the target's greatest over the draft vocabulary.
    """
    loss, correct = _ChunkedSoftCrossEntropy.apply(hidden, head, weights, target, chunk_tokens)  # type: ignore[misc]
    return loss, correct


class _ChunkedSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, weights: Tensor, target: TargetDistribution, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        steps, positions, width = hidden.shape
        accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden) if needs_gradient else None
        head_grad = torch.zeros(head.shape, dtype=accumulate, device=head.device) if needs_gradient else None
        loss = torch.zeros((), dtype=accumulate, device=hidden.device)
        correct = torch.empty(steps, positions, dtype=torch.bool, device=hidden.device)
        compute_head = head.to(hidden.dtype)
        for start in range(0, positions, chunk_tokens):
            end = min(start + chunk_tokens, positions)
            target_logits = target.logits(start, end)
            best = target_logits.argmax(-1)
            p = target_logits.softmax(-1)
            del target_logits
            rows = hidden[:, start:end].reshape(-1, width)
            logits = _product(rows, compute_head).view(steps, end - start, -1)
            correct[:, start:end] = logits.argmax(-1) == best
            chunk_weights = weights[:, start:end].to(accumulate)
            log_norm = logits.logsumexp(-1)
            # -sum p log q = logsumexp(z) - sum p z, because p sums to one.
            expected = torch.einsum("spv,pv->sp", logits, p.to(logits.dtype))
            loss += (chunk_weights * (log_norm - expected)).sum()
            if hidden_grad is not None and head_grad is not None:
                slope = logits.sub_(log_norm.unsqueeze(-1)).exp_().sub_(p).mul_(chunk_weights.unsqueeze(-1))
                slope = slope.view(-1, slope.shape[-1]).to(hidden.dtype)
                hidden_grad[:, start:end] = (slope @ compute_head).view(steps, end - start, width)
                head_grad += slope.T @ rows
        if hidden_grad is not None and head_grad is not None:
            ctx.save_for_backward(hidden_grad, head_grad.to(head.dtype))
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        hidden_grad, head_grad = ctx.saved_tensors
        scale = gradients[0]
        return hidden_grad * scale.to(hidden_grad.dtype), head_grad * scale.to(head_grad.dtype), None, None, None


def _product(rows: Tensor, head: Tensor) -> Tensor:
    """`rows @ head.T`, accumulated and returned in float32 (float64 stays)."""
    product = rows.to(head.dtype) @ head.T
    return product if product.dtype == torch.float64 else product.float()
