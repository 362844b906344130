"""Building blocks that drafts share: the target's embedding and head, and the parts of Llama and Qwen3 layers."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.config.draft_base import LayerShape
from models.drafts.products import SharedWeight, gated_product, products
from models.drafts.row_functions import Tables, rms_norm, rotate


class TargetTable(nn.Module):
    """A `[rows, H]` table that begins as the target's.

    Args:
        weight: how it begins; a frozen table shares the memory.
        trained: a copy becomes a parameter; otherwise it stays as it is.
        stored: whether it is saved with the draft.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, trained: bool, stored: bool):
        super().__init__()
        assert stored or not trained
        if trained:
            self.weight = nn.Parameter(weight.detach().clone())
        else:
            self.register_buffer("weight", weight.detach(), persistent=stored)

    @torch.no_grad()
    def start_as(self, weight: Tensor) -> None:
        """Take the values of `weight` `[rows, H]`, and its memory where the table is frozen."""
        assert weight.shape == self.weight.shape
        if isinstance(self.weight, nn.Parameter):
            self.weight.copy_(weight)
        else:
            self.weight = weight.to(self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @property
    def factors(self) -> Tensor:
        """`[size]`."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` any dtype to the same shape in autocast's dtype, or else the weight's."""
        return rms_norm(x, self.factors, self.eps)


class AttentionProjections(nn.Module):
    """Projections of grouped-query attention, as in Llama, or with normed queries and keys, as in Qwen3.

    Args:
        shape: heads, their size, biases.
        input_size: width of what queries, keys and values are projected from.
        output_size: width of the result.
        qk_norm: whether queries and keys are normed, head by head, before they are rotated.
    """

    def __init__(self, shape: LayerShape, input_size: int, output_size: int, *, qk_norm: bool):
        super().__init__()
        self.head_dim, bias = shape.head_dim, shape.attention_bias
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=bias)
        self.k_proj = nn.Linear(input_size, keys, bias=bias)
        self.v_proj = nn.Linear(input_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, output_size, bias=bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else None

    def queries(self, projected: Tensor, tables: Tables) -> Tensor:
        """What `q_proj` gives, `[N, heads * d]`, normed and rotated: `[N, heads, d]`."""
        return self._rotated(projected, self.q_norm, tables)

    def keys(self, projected: Tensor, tables: Tables) -> Tensor:
        """What `k_proj` gives, `[N, kv_heads * d]`, normed and rotated: `[N, kv_heads, d]`."""
        return self._rotated(projected, self.k_norm, tables)

    def values(self, projected: Tensor) -> Tensor:
        """What `v_proj` gives as `[N, kv_heads, d]`."""
        return projected.unflatten(-1, (-1, self.head_dim))

    def _rotated(self, projected: Tensor, norm: RMSNorm | None, tables: Tables) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return rotate(heads if norm is None else norm(heads), tables)


class GatedMLP(nn.Module):
    """Llama's feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def weights(self) -> "GatedWeights":
        """For one pass, in which the layer may run several times."""
        gate, up, down = (SharedWeight(x.weight) for x in (self.gate_proj, self.up_proj, self.down_proj))
        return GatedWeights(gate, up, down)


class GatedWeights(NamedTuple):
    """`GatedMLP`'s weights."""

    gate: SharedWeight
    up: SharedWeight
    down: SharedWeight

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + mlp(x)`, `[n, size]`."""
        gate, up = products(x, (self.gate, self.up))
        return gated_product(residual, gate, up, self.down)
