"""Matrix products of a layer that runs several times in one pass, with gradients of weights summed in one place.

Autograd would add up a bfloat16 gradient per use of a weight, in memory passes of their own. Here each use adds its
product to one float32 sum, on a GPU inside the product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.drafts.row_functions import compute_dtype, gated, gated_backward
from models.losses.chunked import add_product


class GradientSum:
    """The gradient `[out, in]` of a weight, at least float32, as far as its uses have added to it."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, slope: Tensor, rows: Tensor) -> None:
        """Add the weight's gradient from `rows @ weight.T` `[n, out]`, given that product's gradient `slope`."""
        if self.total is None:
            wide = torch.promote_types(slope.dtype, torch.float32)
            self.total = torch.zeros(slope.shape[1], rows.shape[1], dtype=wide, device=slope.device)
        add_product(self.total, slope, rows)

    def add_whole(self, gradient: Tensor) -> None:
        """Add a gradient of the weight's own shape."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self.total = gradient.to(wide) if self.total is None else self.total.add_(gradient)


class SharedWeight:
    """A weight `[out, in]` that several products of one pass use: cast once, its gradient summed in one place."""

    def __init__(self, weight: Tensor):
        # Products keep the sum alone: with this object they would keep themselves alive.
        self.gradient = GradientSum()
        self.value: Tensor = _Shared.apply(self.gradient, weight, compute_dtype(weight))  # type: ignore[assignment]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: GradientSum, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.to(dtype) if weight.dtype != dtype else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        """Runs after all products, which give no gradient here: theirs is in the sum."""
        found, ctx.gradient.total = ctx.gradient.total, None
        return None, None if found is None else found.to(ctx.dtype), None


def products(x: Tensor, weights: Sequence[SharedWeight]) -> list[Tensor]:
    """`x @ weight.T` of each weight, for `x` `[n, in]` in the weights' dtype."""
    return list(
        _Products.apply([weight.gradient for weight in weights], None, x, *(weight.value for weight in weights))
    )  # type: ignore[arg-type]


def added_product(residual: Tensor, x: Tensor, weight: SharedWeight) -> Tensor:
    """`residual + x @ weight.T`, `[n, out]` in the residual's dtype."""
    return _Products.apply([weight.gradient], residual, x, weight.value)[0]  # type: ignore[index]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sums: Sequence[GradientSum], residual: Tensor | None, x: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sums, ctx.has_residual = sums, residual is not None
        ctx.save_for_backward(x, *values)
        with torch.autocast(x.device.type, enabled=False):
            if residual is not None:
                return (_added(residual, x, values[0]),)
            return tuple(x @ value.T for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, *values = ctx.saved_tensors
        of_x = None
        for slope, value, total, wanted in zip(gradients, values, ctx.sums, ctx.needs_input_grad[3:], strict=True):
            narrow = slope.to(value.dtype)
            of_x = narrow @ value if of_x is None else of_x.addmm_(narrow, value)
            if wanted:
                total.add(narrow, x)
        return None, gradients[0] if ctx.has_residual else None, of_x, *[None] * len(values)


def _added(residual: Tensor, x: Tensor, value: Tensor) -> Tensor:
    """`residual + x @ value.T`, in one pass where the dtypes are the same."""
    return torch.addmm(residual, x, value.T) if residual.dtype == x.dtype else residual + x @ value.T


def gated_product(residual: Tensor, gate: Tensor, up: Tensor, weight: SharedWeight) -> Tensor:
    """`residual + (silu(gate) * up) @ weight.T`; the activation is computed again in the backward pass."""
    return _GatedProduct.apply(weight.gradient, residual, gate, up, weight.value)  # type: ignore[return-value]


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: GradientSum, residual: Tensor, gate: Tensor, up: Tensor, value: Tensor) -> Tensor:
        ctx.total = total
        ctx.save_for_backward(gate, up, value)
        with torch.autocast(gate.device.type, enabled=False):
            return _added(residual, gated(gate, up), value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gate, up, value = ctx.saved_tensors
        slope = gradients[0].to(value.dtype)
        active, of_gate, of_up = gated_backward(slope @ value, gate, up)
        if ctx.needs_input_grad[4]:
            ctx.total.add(slope, active)
        return None, gradients[0], of_gate, of_up, None
