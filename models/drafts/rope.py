"""Rotary position embedding: tables of cosines and sines for every scaling that drafts may have."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.config.draft_base import LayerShape
from models.config.rope import RopeScaling
from models.drafts.row_functions import Tables
from models.drafts.transfer import to_device


def rotary_tables(positions: Tensor, shape: LayerShape) -> Tables:
    """Cosines and sines for `positions` `[N]`, each `[N, 1, rotary_dim / 2]` float32, by the shape's frequencies.

    `positions` may also be `[N, rotary_dim / 2]`, of every pair its own (`pair_positions`).
    """
    frequencies, scale = inverse_frequencies(shape, positions.device)
    if positions.ndim == 1:
        positions = positions.unsqueeze(-1)
    angles = positions.to(torch.float64).unsqueeze(1) * frequencies
    return (angles.cos() * scale).float(), (angles.sin() * scale).float()


def pair_positions(places: Tensor, axes: Sequence[int]) -> Tensor:
    """`[N, rotary_dim / 2]` int64: where each pair stands, by its axis of `places` `[N, 3]`."""
    (index,) = to_device([torch.tensor(axes)], places.device)
    return places.long()[:, index]


def inverse_frequencies(shape: LayerShape, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position `[rotary_dim / 2]` float64, and the factor of cosines and sines.

    Formulas as in Hugging Face's `modeling_rope_utils.py`, whose names the settings have.
    """
    exponents = torch.arange(0, shape.rotary_dim, 2, device=device, dtype=torch.float64) / shape.rotary_dim
    frequencies, scaling = shape.rope_theta**-exponents, shape.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    divided = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return divided, 1.0
    if scaling.rope_type == "llama3":
        return torch.lerp(divided, frequencies, _llama3_kept(frequencies, scaling)), 1.0
    return torch.lerp(divided, frequencies, _yarn_kept(shape, scaling, device)), _yarn_scale(scaling)


def _llama3_kept(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Which share of each frequency is kept; the rest of it is divided."""
    assert scaling.original_max_position_embeddings is not None
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high == low:  # Llama 4 Scout
        return (turns > low).to(turns)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_kept(shape: LayerShape, scaling: RopeScaling, device: torch.device) -> Tensor:
    """See `_llama3_kept`; arXiv 2309.00071, section 3.2."""
    size = shape.rotary_dim
    assert scaling.original_max_position_embeddings is not None

    def dimension(turns: float) -> float:
        """Index of the pair that makes `turns` turns within the original context."""
        length = scaling.original_max_position_embeddings or 0
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    pairs = torch.arange(size // 2, device=device, dtype=torch.float64)
    return 1 - ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def _yarn_scale(scaling: RopeScaling) -> float:
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return _strength(scaling, 1.0)
    return _strength(scaling, scaling.mscale) / _strength(scaling, scaling.mscale_all_dim)


def latent_scale(scaling: RopeScaling | None) -> float:
    """Factor of all scores of latent attention, beside `d ** -0.5`: YaRN's, squared, which stands for both sides."""
    if scaling is None or scaling.mscale_all_dim is None:
        return 1.0
    return _strength(scaling, scaling.mscale_all_dim) ** 2


def _strength(scaling: RopeScaling, mscale: float) -> float:
    return 0.1 * mscale * math.log(scaling.factor) + 1.0
