"""Gemma 3 inside SGLang: makes its layers hand over their whole output. Runs in the scheduler, with the plugin.

SGLang 0.5.23 captures what a decoder layer of Gemma 3 returns, but that layer leaves the last residual addition to the
next layer's norm, whose CUDA kernel then works in place, on what was captured (sgl-project/sglang#39286). Llama and
Qwen add before they capture. A draft reads the same features where it is trained and where it is served, so this holds
for every engine that captures, be it for us or for its own draft.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MODULE = "sglang.srt.models.gemma3_causal."
LAYER = MODULE + "Gemma3DecoderLayer.forward"
CAPTURE = MODULE + "Gemma3ForCausalLM.set_eagle3_layers_to_capture"
MARK = "hands_over_its_whole_output"


def mark_layers(_: None, model: Any, *_arguments: Any, **_named: Any) -> None:
    """After a model was told to capture: an engine that does not is left as it is."""
    for layer in model.model.layers:
        setattr(layer, MARK, True)


def whole_output(
    original: Callable[..., tuple[Tensor, Tensor]],
    layer: Any,
    *arguments: Any,
    hidden_states: Tensor,
    residual: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Around the layer: what it returns is its output `[T, H]`, and nothing is left to add."""
    if not getattr(layer, MARK, False):
        return original(layer, *arguments, hidden_states=hidden_states, residual=residual, **named)
    if residual is not None:
        hidden_states = hidden_states.clone()
    output, residual = original(layer, *arguments, hidden_states=hidden_states, residual=residual, **named)
    whole = output + residual
    return whole, torch.zeros_like(whole)
