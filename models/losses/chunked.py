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
    labels: Tensor | None = None
    """`[P]` int64 the text's own next tokens as draft ids, -1 for others; only where the divergence reads them."""

    def chunk(self, positions: slice) -> "TargetChunk":
        """The target at some positions."""
        labels = None if self.labels is None else self.labels[positions]
        logits = shape_logits(product(self.last[positions], self.head), self.logit_scale, self.soft_cap)
        if self.draft_ids is None:
            return TargetChunk(logits, logits.new_zeros(len(logits), 1), labels)
        inside = logits.index_select(1, self.draft_ids)
        log_mass = (inside.logsumexp(-1) - logits.logsumexp(-1)).clamp_(max=0)
        return TargetChunk(inside, log_mass.unsqueeze(-1), labels)


class TargetChunk(NamedTuple):
    """The target at n positions."""

    logits: Tensor
    """`[n, Vd]` float32, over the draft vocabulary."""
    log_mass: Tensor
    """`[n, 1]` log of the draft vocabulary's share of the target's probability; 0 where it is taken for the whole."""
    labels: Tensor | None
    """`[n]` int64."""

    def rows(self, chosen: slice) -> "TargetChunk":
        """Some of the positions."""
        labels = None if self.labels is None else self.labels[chosen]
        return TargetChunk(self.logits[chosen], self.log_mass[chosen], labels)


class Diverged(NamedTuple):
    """What a divergence says of n positions and S steps."""

    values: Tensor
    """`[n, S]`."""
    slope: Tensor | None
    """`[n, S, Vd]` the weighted slope of the values by the logits; None if it was not wanted."""
    acceptance: Tensor | None = None
    """`[n, S]` sum over v of min(p(v), q(v)), from divergences that tell it."""


class LossDivergence:
    """How far q is from p at a position, and its slope."""

    labelled: bool = False
    """Whether it reads the text's own tokens."""

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, weights: Tensor | None, labels: Tensor | None
    ) -> Diverged:
        """Values, and with weights their slope.

        Args:
            logits: `[n, S, Vd]` the draft's, q = softmax; may be overwritten.
            log_p: `[n, Vd]` log of the target's probabilities, normalised over the draft vocabulary.
            log_mass: `[n, 1]` log of the draft vocabulary's share of the target's whole distribution.
            weights: `[n, S]`, by which the slope is multiplied; None if it is not wanted.
            labels: `[n]` int64 the text's own tokens as draft ids, -1 for others; None unless `labelled`.
        """
        raise NotImplementedError


class Factor(NamedTuple):
    """A part of the draft's logits: `hidden @ head.T`."""

    hidden: Sequence[Tensor]
    """S times `[P, h]`."""
    head: Tensor
    """`[Vd, h]`."""


class SummedLoss(NamedTuple):
    """What `chunked_loss` gives."""

    loss: Tensor
    """Scalar, float32 (float64 for float64 drafts); differentiable in all `hidden` and `head`."""
    correct: Tensor
    """`[P, S]` bool: the draft's greatest logit is the target's greatest of the draft vocabulary. Where several of the
    draft's are equally great, as happens in bfloat16, one of them is enough: an argmax takes 3 % of the loss's time."""
    acceptance: Tensor
    """`[P, S]` float32 without gradients, see `Diverged`; 0 from divergences that do not tell it."""
    best: Tensor
    """`[P]` int64, the target's greatest of the draft vocabulary."""


def chunked_loss(
    hidden: Sequence[Tensor],
    head: Tensor,
    weights: Tensor,
    target: TargetDistribution,
    divergence: LossDivergence,
    chunk_tokens: int,
    *,
    more: Sequence[Factor] = (),
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
        more: what is added to the logits of `hidden` and `head`.
        overwrite: `hidden` is nobody else's: its gradients may take its memory.
    """
    assert not divergence.labelled or target.labels is not None
    factors = [Factor(hidden, head), *more]
    # Dtypes are those of `hidden` and of the target's head: autocast would also take sums for matrix products.
    with torch.autocast(head.device.type, enabled=False):
        how = _LossSettings(target, divergence, chunk_tokens, overwrite, len(factors))
        flat = [tensor for factor in factors for tensor in (factor.head, *factor.hidden)]
        found = _ChunkedLoss.apply(how, weights, *flat)
    return SummedLoss(*found)  # type: ignore[misc]


class _LossSettings(NamedTuple):
    target: TargetDistribution
    divergence: LossDivergence
    chunk_tokens: int
    overwrite: bool
    factors: int


class _Part:
    """A factor in the forward pass: its rows, its head in their dtype, and the gradients of both."""

    def __init__(self, tensors: Sequence[Tensor], wanted: Sequence[bool], overwrite: bool):
        head, *self.hidden = tensors
        self.width, dtype = head.shape[1], self.hidden[0].dtype
        self.head, self.head_dtype = head.to(dtype), head.dtype
        own = (x.detach() if overwrite else torch.empty_like(x) for x in self.hidden)
        self.gradients = list(own) if any(wanted) else []
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.head_grad = torch.zeros(head.shape, dtype=wide, device=head.device) if wanted[0] else None

    def rows(self, chunk: slice) -> Tensor:
        """`[n * S, h]`."""
        return torch.stack([x[chunk] for x in self.hidden], dim=1).view(-1, self.width)

    def add_gradients(self, chunk: slice, rows: Tensor, slope: Tensor) -> None:
        """Of a chunk's rows, and their part of the head's; `slope` `[n * S, Vd]` by the logits."""
        if not self.gradients:
            return
        by_step = (slope @ self.head).view(-1, len(self.hidden), self.width).unbind(1)
        for found, gradient in zip(self.gradients, by_step, strict=True):
            found[chunk] = gradient
        if self.head_grad is not None:
            add_product(self.head_grad, slope, rows)

    def saved(self) -> tuple[Tensor | None, ...]:
        """Gradients by the head and by the hidden states."""
        of_head = None if self.head_grad is None else self.head_grad.to(self.head_dtype)
        return of_head, *(self.gradients or [None] * len(self.hidden))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _LossSettings, weights: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        size = len(flat) // how.factors
        wanted = ctx.needs_input_grad[2:]
        parts = [_Part(flat[at : at + size], wanted[at : at + size], how.overwrite) for at in range(0, len(flat), size)]
        first, with_slope = parts[0], any(wanted)
        steps, positions, device = len(first.hidden), len(first.hidden[0]), flat[0].device
        accumulate = torch.float64 if first.hidden[0].dtype == torch.float64 else torch.float32
        loss = torch.zeros((), dtype=accumulate, device=device)
        correct = torch.empty(positions, steps, dtype=torch.bool, device=device)
        acceptance = torch.zeros(positions, steps, dtype=accumulate, device=device)
        best = torch.empty(positions, dtype=torch.int64, device=device)
        for start in range(0, positions, how.chunk_tokens):
            chunk = slice(start, min(start + how.chunk_tokens, positions))
            target = how.target.chunk(chunk)
            rows = [part.rows(chunk) for part in parts]
            logits = rows[0] @ first.head.T
            for part, more in zip(parts[1:], rows[1:], strict=True):
                logits.addmm_(more, part.head.T)
            by_step = logits.view(-1, steps, len(first.head))
            given = (by_step, weights[chunk].to(accumulate), target)
            value, correct[chunk], acceptance[chunk], best[chunk] = _diverge(*given, how.divergence, with_slope)
            loss += value
            for part, own in zip(parts, rows, strict=True):
                part.add_gradients(chunk, own, logits)
            # Not beside those of the next chunk.
            del logits, by_step, given, target
        ctx.save_for_backward(*(tensor for part in parts for tensor in part.saved()))
        ctx.mark_non_differentiable(correct, acceptance, best)
        return loss, correct, acceptance, best

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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted sum of values, `[n, S]` what is correct and what is accepted, and `[n]` the target's greatest.

    The weighted slope takes the place of `logits` `[n, S, V]`. Block by block: the passes over a block meet it in the
    cache, and only a block is alive in float32.
    """
    count, steps, vocabulary = logits.shape
    total, correct = weights.new_zeros(()), torch.empty(count, steps, dtype=torch.bool, device=logits.device)
    acceptance, best = torch.zeros_like(weights), torch.empty(count, dtype=torch.int64, device=logits.device)
    at_once = max(1, count if compiles(logits.device) else _block_bytes(logits.device) // (4 * steps * vocabulary))
    for start in range(0, count, at_once):
        block = slice(start, min(start + at_once, count))
        given = (logits[block], weights[block], *target.rows(block))
        value, correct[block], accepted, best[block] = _diverge_rows(*given, (divergence, with_slope))
        total += value
        if accepted is not None:
            acceptance[block] = accepted
    return total, correct, acceptance, best


@fused
def _diverge_rows(
    logits: Tensor,
    weights: Tensor,
    of_target: Tensor,
    log_mass: Tensor,
    labels: Tensor | None,
    how: tuple[LossDivergence, bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """See `_diverge`; `how`: the divergence, and whether the slope is wanted, which is written to `logits`."""
    divergence, with_slope = how
    wide = logits.to(weights.dtype)
    best = of_target.argmax(-1)
    correct = wide.gather(-1, best[:, None, None].expand(-1, wide.shape[1], 1)).squeeze(-1) == wide.amax(-1)
    log_p = of_target.log_softmax(-1).to(wide.dtype)
    found = divergence(wide, log_p, log_mass.to(wide.dtype), weights if with_slope else None, labels)
    value = (weights * found.values).sum()
    if found.slope is not None:
        logits.copy_(found.slope)
    return value, correct, found.acceptance, best


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
