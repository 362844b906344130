"""Building blocks that drafts share: the target's embedding and head, and plain Llama layers."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.drafts.products import SharedWeight, gated_product, products
from models.drafts.row_functions import rms_norm


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

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` any dtype to the same shape in autocast's dtype, or else the weight's."""
        return rms_norm(x, self.weight, self.eps)


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


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `positions` `[N]`, each `[N, 1, head_dim / 2]`, float32 (float64 for float64 drafts)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions.to(torch.float64)[:, None, None] * (theta**-exponents)
    return angles.cos().float(), angles.sin().float()
