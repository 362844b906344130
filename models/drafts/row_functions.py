"""Row-wise operations between matrix products: norms, rotary embedding, gated activation.

Each is one kernel on a GPU (see `models.fused`). Gradients are written by hand: the backward pass keeps an operation's
inputs in their own dtype, and no float32 copy of them.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.fused import fused

Tables = tuple[Tensor, Tensor]
"""Cosines and sines `[N, 1, r / 2]` of the rotated part r of every head."""


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What products of `tensor` are computed in: autocast's dtype, or its own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of `x` `[..., size]`, computed in the weight's dtype, returned in `compute_dtype`."""
    return _RmsNorm.apply(x, weight, eps, compute_dtype(weight))  # type: ignore[return-value]


@fused
def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The normed rows in `dtype`, and the factor `[..., 1]` of each row."""
    wide = x.to(weight.dtype)
    factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * factor).mul_(weight).to(dtype), factor


@fused
def _norm_backward(gradient: Tensor, x: Tensor, factor: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x` `[n, size]` and of `weight`."""
    normed, slope = x.to(weight.dtype) * factor, gradient.to(weight.dtype)
    of_weight = (slope * normed).sum(0)
    slope = slope * weight
    share = (slope * normed).mean(-1, keepdim=True)
    return slope.sub_(normed.mul_(share)).mul_(factor).to(x.dtype), of_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            normed, factor = _norm(x, weight, eps, dtype)
        ctx.save_for_backward(x, factor, weight)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, factor, weight = ctx.saved_tensors
        of_x, of_weight = _norm_backward(gradients[0].flatten(0, -2), x.flatten(0, -2), factor.flatten(0, -2), weight)
        return of_x.view_as(x), of_weight, None, None


class Embeddings(NamedTuple):
    """What rows embed, by number: a token of the vocabulary, or from V on an image's parts."""

    table: Tensor
    """`[V, H]`."""
    shown: Tensor | None = None
    """`[M, H]` the target's embeddings of the images of a micro-batch, in any order; they are never trained."""


def embedded_input(
    embeddings: Embeddings, tokens: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """Normed embeddings of `tokens` `[N]` beside normed `hidden` `[N, H]`: `[N, 2H]` in `compute_dtype`.

    The backward pass looks the embeddings up again.
    """
    return _EmbeddedInput.apply(*embeddings, tokens, hidden, *weights, eps, compute_dtype(weights[0]))  # type: ignore[return-value]


def _looked_up(table: Tensor, shown: Tensor | None, tokens: Tensor) -> Tensor:
    """`[N, H]` see `Embeddings`."""
    if shown is None:
        return F.embedding(tokens, table)
    count = len(table)
    found = F.embedding(tokens.clamp(max=count - 1), table)
    # Every row is looked up in both: choosing rows would have the host wait for their number.
    other = F.embedding((tokens - count).clamp(min=0), shown)
    return torch.where((tokens < count).unsqueeze(-1), found, other.to(found.dtype))


@fused
def _paired_norm(
    first: Tensor, second: Tensor, weights: tuple[Tensor, Tensor], eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Both norms side by side, and the factors of each."""
    wide = [x.to(weights[0].dtype) for x in (first, second)]
    factors = [(x.square().mean(-1, keepdim=True) + eps).rsqrt() for x in wide]
    parts = [(x * factor).mul_(weight).to(dtype) for x, factor, weight in zip(wide, factors, weights, strict=True)]
    return torch.cat(parts, dim=-1), factors[0], factors[1]


class _EmbeddedInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, shown: Tensor | None, tokens: Tensor, hidden: Tensor, *weights_and_how: Any
    ) -> Tensor:
        of_table, of_hidden, *how = weights_and_how
        with torch.autocast(hidden.device.type, enabled=False):
            both, *factors = _paired_norm(_looked_up(table, shown, tokens), hidden, (of_table, of_hidden), *how)
        ctx.save_for_backward(table, shown, tokens, hidden, of_table, of_hidden, *factors)
        return both

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        table, shown, tokens, hidden, of_table, of_hidden, *factors = ctx.saved_tensors
        first, second = gradients[0].chunk(2, dim=-1)
        of_rows, of_first = _norm_backward(first, _looked_up(table, shown, tokens), factors[0], of_table)
        of_x, of_second = _norm_backward(second, hidden, factors[1], of_hidden)
        trained = ctx.needs_input_grad[0]
        assert not (trained and shown is not None), "a draft with embeddings of its own reads none of images"
        of_rows = torch.ops.aten.embedding_dense_backward(of_rows, tokens, len(table), -1, False) if trained else None
        return of_rows, None, None, of_x, of_first, of_second, None, None


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Apply rotary position embedding (half-split layout) to the tables' part of `x` `[N, heads, head_dim]`."""
    return _Rotate.apply(x, *tables)  # type: ignore[return-value]


@fused
def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None


@fused
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return F.silu(gate).mul_(up)


@fused
def gated_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`gated(gate, up)` once more, and the gradients of `gate` and `up`, given that of the result."""
    active = F.silu(gate)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return active * up, of_gate, active.mul_(gradient)
