"""Gemma 3 inside SGLang: makes its layers hand over their whole output. Runs in the scheduler, with the plugin.

SGLang 0.5.23 captures what a decoder layer of Gemma 3 returns, but that layer leaves the last residual addition to the
next layer's norm, whose CUDA kernel then works in place, on what was captured. Llama and Qwen add before they capture.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYER = "sglang.srt.models.gemma3_causal.Gemma3DecoderLayer.forward"


def whole_output(
    original: Callable[..., tuple[Tensor, Tensor]],
    layer: Any,
    *arguments: Any,
    hidden_states: Tensor,
    residual: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Around the layer: what it returns is its output `[T, H]`, and nothing is left to add."""
    if residual is not None:
        hidden_states = hidden_states.clone()
    output, residual = original(layer, *arguments, hidden_states=hidden_states, residual=residual, **named)
    whole = output + residual
    return whole, torch.zeros_like(whole)
