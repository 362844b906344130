"""Losses between the target's and the draft's distribution, in chunks over positions. Runs in trainer ranks.

Logits live for one chunk of positions at a time; the target's probabilities are computed once per chunk and serve all
steps; gradients are formed in the forward pass, so nothing of the size of tokens x vocabulary is kept or redone.
"""

from dataclasses import dataclass
from typing import Any, Protocol

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
    log_norm: Tensor | None = None
    """`[P]` log of the sum of exp(logits) over the target's whole vocabulary; None: the draft vocabulary is taken for
    the whole."""

    def logits(self, start: int, end: int) -> Tensor:
        """`[end - start, Vd]` float32 logits over the draft vocabulary."""
        return shape_logits(product(self.last[start:end], self.head), self.logit_scale, self.soft_cap)

    def log_mass(self, logits: Tensor, start: int) -> Tensor:
        """`[n, 1]` log of the draft vocabulary's share of the target's probability, for rows `start ..` of `logits`."""
        if self.log_norm is None:
            return logits.new_zeros(len(logits), 1)
        inside = logits.logsumexp(-1) - self.log_norm[start : start + len(logits)].to(logits.dtype)
        return inside.clamp(max=0).unsqueeze(-1)


class Divergence(Protocol):
    """How far q is from p at a position, and its slope."""

    @property
    def true_mass(self) -> bool:
        """Whether it asks for `TargetDistribution.log_norm`."""
        ...

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, with_slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Values `[S, n]`, and their slope `[S, n, Vd]` by `logits` if wanted.

        Args:
            logits: `[S, n, Vd]` the draft's, q = softmax; may be overwritten.
            log_p: `[n, Vd]` log of the target's probabilities, normalised over the draft vocabulary.
            log_mass: `[n, 1]` log of the draft vocabulary's share of the target's whole distribution.
            with_slope: whether the slope is wanted.
        """
        ...


def chunked_loss(
    hidden: Tensor,
    head: Tensor,
    weights: Tensor,
    target: TargetDistribution,
    divergence: Divergence,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of a divergence over steps and positions.

    Args:
        hidden: `[S, P, h]` draft hidden states (after its norm): step s's prediction of position p's next token.
        head: `[Vd, h]` draft head.
        weights: `[S, P]` float32; 0 leaves a position out.
        target: the target's distribution at the P positions.
        divergence: what is summed.
        chunk_tokens: positions whose logits are alive at once.

    Returns:
        The loss (float32 scalar, differentiable in `hidden` and `head`) and `[S, P]` bool: whether the draft's
        greatest logit is the target's greatest over the draft vocabulary.
    """
    loss, correct = _ChunkedLoss.apply(hidden, head, weights, target, (divergence, chunk_tokens))  # type: ignore[misc]
    return loss, correct


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        weights: Tensor,
        target: TargetDistribution,
        how: tuple[Divergence, int],
    ) -> tuple[Tensor, Tensor]:
        divergence, chunk_tokens = how
        steps, positions, width = hidden.shape
        accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        of_hidden, of_head = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if of_hidden or of_head else None
        head_grad = torch.zeros(head.shape, dtype=accumulate, device=head.device) if of_head else None
        loss = torch.zeros((), dtype=accumulate, device=hidden.device)
        correct = torch.empty(steps, positions, dtype=torch.bool, device=hidden.device)
        compute_head = head.to(hidden.dtype)
        for start in range(0, positions, chunk_tokens):
            end = min(start + chunk_tokens, positions)
            target_logits = target.logits(start, end)
            log_mass = target.log_mass(target_logits, start)
            rows = hidden[:, start:end].reshape(-1, width)
            logits = product(rows, compute_head).view(steps, end - start, -1)
            correct[:, start:end] = logits.argmax(-1) == target_logits.argmax(-1)
            log_p = target_logits.log_softmax(-1).to(logits.dtype)
            del target_logits
            chunk_weights = weights[:, start:end].to(accumulate)
            values, slope = divergence(logits, log_p, log_mass.to(logits.dtype), hidden_grad is not None)
            loss += (chunk_weights * values).sum()
            if slope is not None and hidden_grad is not None:
                slope = slope.mul_(chunk_weights.unsqueeze(-1)).view(-1, slope.shape[-1]).to(hidden.dtype)
                hidden_grad[:, start:end] = (slope @ compute_head).view(steps, end - start, width)
                if head_grad is not None:
                    head_grad += slope.T @ rows
        ctx.save_for_backward(hidden_grad, None if head_grad is None else head_grad.to(head.dtype))
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scale = gradients[0]
        of_inputs = (None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*of_inputs, None, None, None)


def product(rows: Tensor, head: Tensor) -> Tensor:
    """`rows @ head.T`, accumulated and returned in float32 (float64 stays)."""
    found = rows.to(head.dtype) @ head.T
    return found if found.dtype == torch.float64 else found.float()


def shape_logits(logits: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """What a target makes of `h @ head.T`: a factor, and perhaps a soft cap."""
    logits = logits * scale
    return logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap
