"""Patches Gemma 3 in SGLang so that its layers return their complete output.

SGLang 0.5.23 captures what a decoder layer of Gemma 3 returns, but that layer leaves the last residual addition to the
next layer's norm, whose CUDA kernel then overwrites the captured tensor in place (sgl-project/sglang#39286). Llama and
Qwen add before they capture. A draft must read the same features in training and in service, so the patch applies to
every engine that captures, including serving engines that capture for their own draft.
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
    """Hook after a model is told to capture; engines that do not capture stay unchanged."""
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
    """Hook around a layer: returns its complete output `[T, H]` and a zero residual."""
    if not getattr(layer, MARK, False):
        return original(layer, *arguments, hidden_states=hidden_states, residual=residual, **named)
    if residual is not None:
        hidden_states = hidden_states.clone()
    output, residual = original(layer, *arguments, hidden_states=hidden_states, residual=residual, **named)
    whole = output + residual
    return whole, torch.zeros_like(whole)
