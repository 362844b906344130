"""Rows of hidden states in e4m3, each layer's part of a row with a scale of its own: half the bytes of bfloat16.

A stored row holds the codes of `groups` layers, `groups * H` bytes, then their scales as float32, `groups * 4` bytes.
Elements are rounded to 4 significant bits, a relative error of 2.6 % of a row's norm.
"""

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
SCALE_BYTES = 4
GREATEST = 448.0
"""The greatest number in e4m3."""
LEAST_SCALE = 1e-30


def encode(rows: Tensor, groups: int) -> Tensor:
    """`[T, groups * H]` to stored rows `[T, groups * (H + 4)]` of e4m3, on the same device."""
    if not groups:
        return rows.to(FLOAT8)
    parts = rows.float().unflatten(-1, (groups, -1))
    scales = (parts.abs().amax(-1) / GREATEST).clamp_min(LEAST_SCALE)
    codes = (parts / scales[..., None]).to(FLOAT8).flatten(-2)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1).view(FLOAT8)


def decode(stored: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Stored rows back to `[T, groups * H]` in `dtype`."""
    if not groups:
        return stored.to(dtype)
    codes, scales = stored.split([stored.shape[-1] - groups * SCALE_BYTES, groups * SCALE_BYTES], dim=-1)
    factors = scales.contiguous().view(torch.float32)
    return (codes.float().unflatten(-1, (groups, -1)) * factors[..., None]).flatten(-2).to(dtype)
