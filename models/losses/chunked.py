"""Losses between two distributions, in chunks over positions, gradients formed in the forward pass.

Logits live for one chunk of positions at a time, in one buffer in which their gradient takes their place; float32
copies live for a block of it. The target is projected once per chunk and serves all steps, so nothing of the size of
tokens x vocabulary is kept or redone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.fused import compiles, fused

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Draft logits, or rows of the head's gradient, that are worked on at once, as float32: what stays in a processor's
cache, or fills a GPU."""


@dataclass(frozen=True)
class TargetDistribution:
    """What the target's probabilities at a position are computed from."""

    last: Tensor
    """`[P, H]` hidden states after the target's final norm."""
    head: Tensor
    """`[Vd, H]` the target head's rows of the draft vocabulary; with `draft_ids`, `[V, H]` the whole head."""
    logit_scale: float = 1.0
    soft_cap: float | None = None
    draft_ids: Tensor | None = None
    """`[Vd]` int64 rows of the whole `head` that are the draft vocabulary's. None: the draft vocabulary is taken for
    the whole."""

    def chunk(self, positions: slice) -> "TargetChunk":
        """The target at some positions."""
        logits = shape_logits(product(self.last[positions], self.head), self.logit_scale, self.soft_cap)
        if self.draft_ids is None:
            return TargetChunk(logits, logits.new_zeros(len(logits), 1))
        inside = logits.index_select(1, self.draft_ids)
        return TargetChunk(inside, (inside.logsumexp(-1) - logits.logsumexp(-1)).clamp_(max=0).unsqueeze(-1))


class TargetChunk(NamedTuple):
    """The target at n positions."""

    logits: Tensor
    """`[n, Vd]` float32, over the draft vocabulary."""
    log_mass: Tensor
    """`[n, 1]` log of the draft vocabulary's share of the target's probability; 0 where it is taken for the whole."""


Sloped = tuple[Tensor, Tensor | None]


class LossDivergence:
    """How far q is from p at a position, and its slope."""

    def __call__(self, logits: Tensor, log_p: Tensor, log_mass: Tensor, weights: Tensor | None) -> Sloped:
        """Values `[n, S]`, and with weights their weighted slope `[n, S, Vd]` by `logits`.

        Args:
            logits: `[n, S, Vd]` the draft's, q = softmax; may be overwritten.
            log_p: `[n, Vd]` log of the target's probabilities, normalised over the draft vocabulary.
            log_mass: `[n, 1]` log of the draft vocabulary's share of the target's whole distribution.
            weights: `[n, S]`, by which the slope is multiplied; None if it is not wanted.
        """
        raise NotImplementedError


class SummedLoss(NamedTuple):
    """What `chunked_loss` gives."""

    loss: Tensor
    """Scalar, float32 (float64 for float64 drafts); differentiable in `hidden` and `head`."""
    correct: Tensor
    """`[P, S]` bool: the draft's greatest logit is the target's greatest of the draft vocabulary."""


def chunked_loss(
    hidden: Sequence[Tensor],
    head: Tensor,
    weights: Tensor,
    target: TargetDistribution,
    divergence: LossDivergence,
    chunk_tokens: int,
    *,
    overwrite: bool = False,
) -> SummedLoss:
    """Weighted sum of a divergence over positions and steps.

    Args:
        hidden: S times `[P, h]` draft hidden states (after its norm): step s's prediction of position p's next token.
        head: `[Vd, h]` draft head.
        weights: `[P, S]` float32; 0 leaves a prediction out.
        target: the target's distribution at the P positions.
        divergence: what is summed.
        chunk_tokens: positions whose logits are alive at once.
        overwrite: `hidden` is nobody else's: its gradients may take its memory.
    """
    # Dtypes are those of `hidden` and of the target's head: autocast would also take sums for matrix products.
    with torch.autocast(head.device.type, enabled=False):
        how = _LossSettings(target, divergence, chunk_tokens, overwrite)
        found = _ChunkedLoss.apply(how, weights, head, *hidden)
    return SummedLoss(*found)  # type: ignore[misc]


class _LossSettings(NamedTuple):
    target: TargetDistribution
    divergence: LossDivergence
    chunk_tokens: int
    overwrite: bool


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _LossSettings, weights: Tensor, head: Tensor, *hidden: Tensor) -> tuple[Tensor, Tensor]:
        positions, width = hidden[0].shape
        dtype, device = hidden[0].dtype, head.device
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        with_slope, of_head = any(ctx.needs_input_grad[2:]), ctx.needs_input_grad[2]
        gradients = [x.detach() if how.overwrite else torch.empty_like(x) for x in hidden] if with_slope else []
        head_grad = torch.zeros(head.shape, dtype=accumulate, device=device) if of_head else None
        loss = torch.zeros((), dtype=accumulate, device=device)
        correct = torch.empty(positions, len(hidden), dtype=torch.bool, device=device)
        compute_head = head.to(dtype)
        for start in range(0, positions, how.chunk_tokens):
            chunk = slice(start, min(start + how.chunk_tokens, positions))
            part = how.target.chunk(chunk)
            rows = torch.stack([x[chunk] for x in hidden], dim=1).view(-1, width)
            logits = (rows @ compute_head.T).view(-1, len(hidden), len(head))
            value, correct[chunk] = _diverge(logits, weights[chunk].to(accumulate), part, how.divergence, with_slope)
            loss += value
            slope = logits.view(len(rows), len(head))
            if with_slope:
                by_step = (slope @ compute_head).view(-1, len(hidden), width).unbind(1)
                for found, gradient in zip(gradients, by_step, strict=True):
                    found[chunk] = gradient
                if head_grad is not None:
                    add_product(head_grad, slope, rows)
            # Not beside those of the next chunk.
            del logits, slope, part
        ctx.save_for_backward(None if head_grad is None else head_grad.to(head.dtype), *gradients)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scale, saved = gradients[0], ctx.saved_tensors
        # In place: a copy of all would be the step's peak of memory. The host would wait for a device's number.
        if scale.device.type != "cpu" or float(scale) != 1:
            for grad in saved:
                if grad is not None:
                    grad.mul_(scale)
        return (None, None, *saved)


def _diverge(
    logits: Tensor, weights: Tensor, target: TargetChunk, divergence: LossDivergence, with_slope: bool
) -> tuple[Tensor, Tensor]:
    """Weighted sum of values, and `[n, S]` what is correct; the weighted slope takes the place of `logits` `[n, S, V]`.

    Block by block: the passes over a block meet it in the cache, and only a block is alive in float32.
    """
    count, steps, vocabulary = logits.shape
    total, correct = weights.new_zeros(()), torch.empty(count, steps, dtype=torch.bool, device=logits.device)
    at_once = max(1, count if compiles(logits.device) else _block_bytes(logits.device) // (4 * steps * vocabulary))
    for start in range(0, count, at_once):
        block = slice(start, min(start + at_once, count))
        given = (logits[block], weights[block], target.logits[block], target.log_mass[block])
        value, correct[block] = _diverge_rows(*given, divergence, with_slope)
        total += value
    return total, correct


@fused
def _diverge_rows(
    logits: Tensor, weights: Tensor, of_target: Tensor, log_mass: Tensor, divergence: LossDivergence, with_slope: bool
) -> tuple[Tensor, Tensor]:
    """See `_diverge`; the slope, if wanted, is written to `logits`."""
    wide = logits.to(weights.dtype)
    best = of_target.argmax(-1)[:, None, None].expand(-1, wide.shape[1], 1)
    correct = wide.gather(-1, best).squeeze(-1) == wide.amax(-1)
    log_p = of_target.log_softmax(-1).to(wide.dtype)
    values, slope = divergence(wide, log_p, log_mass.to(wide.dtype), weights if with_slope else None)
    value = (weights * values).sum()
    if slope is not None:
        logits.copy_(slope)
    return value, correct


def add_product(total: Tensor, slope: Tensor, rows: Tensor) -> None:
    """`total += slope.T @ rows`, for `total` `[out, in]` in the dtype of `slope` and `rows`, or wider."""
    if total.dtype == slope.dtype:
        total.addmm_(slope.T, rows)
    elif total.device.type != "cpu":
        torch.ops.aten.addmm.dtype_out(total, slope.T, rows, total.dtype, out=total)
    else:
        # A CPU's product has the dtype of its factors, and a sum converts all that it adds: block by block.
        at_once = max(1, _block_bytes(total.device) // (total.shape[1] * total.element_size()))
        for start in range(0, len(total), at_once):
            block = slice(start, start + at_once)
            total[block] += slope[:, block].T @ rows


def _block_bytes(device: torch.device) -> int:
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"])


def product(rows: Tensor, head: Tensor) -> Tensor:
    """`rows @ head.T`, accumulated and returned in float32 (float64 stays)."""
    found = rows.to(head.dtype) @ head.T
    return found if found.dtype == torch.float64 else found.float()


def shape_logits(logits: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """What a target makes of `h @ head.T`: a factor, and perhaps a soft cap. May overwrite `logits`."""
    if scale != 1:
        logits = logits.mul_(scale)
    return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)
