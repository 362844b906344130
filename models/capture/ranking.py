"""The canary of quantized and of large targets, and of images: captured states must rank like those of a plain forward.

Kernels that quantize activations compute other values than a forward with dequantized weights, by several per cent, an
image is scaled by another library, and how rounding grows over the layers of a large target was never measured, so
values are not compared. Each row must be
nearer to the reference's row of its own layer and position than to any other.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from infra.refusal import Refusal
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout, SampleError
from models.targets.model import TargetModel

LEAST_NEAREST = 0.8
"""Share of rows that must be nearest to their own."""
LEAST_SAME_TOKEN = 0.6
"""Share of positions at which the head must choose the reference's token."""


@torch.no_grad()
def check_ranking(
    target: TargetModel,
    captured: HiddenStates,
    tokens: Tensor,
    layout: HiddenStateLayout,
    seen: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Raise Refusal, naming the layer, unless `captured`, of `tokens` `[T]`, ranks like `target`'s own states.

    `seen`: what the target's model reads of images (`ImageProcessor.inputs`).
    """
    try:
        layout.check(captured, len(tokens))
    except SampleError as error:
        raise Refusal(f"canary: {error}") from None
    reference = target.model(tokens[None].to(target.device), output_hidden_states=True, **seen)
    layers = torch.stack([states[0].float() for states in reference.hidden_states[1:]])
    for chunk, layer_id in zip(layout.by_layer(captured.aux), target.aux_layer_ids, strict=True):
        # For the last layer transformers returns the output after the final norm.
        last = layer_id + 1 == len(layers)
        _check_nearest(target.body.norm(chunk.to(target.head_weight)) if last else chunk, layers, layer_id)
    own = target.logits(captured.last.to(target.head_weight)).argmax(-1)
    same = (own == reference.logits[0].argmax(-1)).float().mean().item()
    if same < LEAST_SAME_TOKEN:
        raise Refusal(f"canary: head(last) gives the token of a plain forward at only {same:.0%} of positions")


def _check_nearest(rows: Tensor, layers: Tensor, layer_id: int) -> None:
    """Raise Refusal unless most of `rows` `[T, H]` are nearest to theirs of all rows of `layers` `[L, T, H]`."""
    nearest = torch.cdist(rows.float(), layers.flatten(0, 1)).argmin(-1)
    layer, position = nearest // len(rows), nearest % len(rows)
    offset = position - torch.arange(len(rows), device=rows.device)
    share = ((layer == layer_id) & (offset == 0)).float().mean().item()
    if share < LEAST_NEAREST:
        found, moved = int(layer.mode().values), int(offset.mode().values)
        raise Refusal(
            f"canary: what was captured as layer {layer_id} is nearest to a forward's own row in only {share:.0%} of "
            f"the rows; most are nearest to layer {found}, {moved:+d} positions on"
        )
