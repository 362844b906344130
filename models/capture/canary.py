"""The canary: a generator counts as ready only after a capture of it agreed with an independent forward."""

import torch
from torch import Tensor

from models.capture.layout import Layout
from models.targets.model import HiddenStates, TargetModel

RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def check_capture(target: TargetModel, captured: HiddenStates, tokens: Tensor, layout: Layout) -> None:
    """Compare `captured`, the hidden states of `tokens` `[T]`, with transformers' own record of the same forward.

    Raises ValueError that names what is wrong: shapes, values of a layer, the final norm, or the predicted tokens.
    """
    expected = {
        "aux": (len(tokens), layout.aux_count * layout.hidden_size),
        "last": (len(tokens), layout.hidden_size),
    }
    for name, shape in expected.items():
        tensor: Tensor = getattr(captured, name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"canary: {name} has shape {list(tensor.shape)}, the run needs {list(shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"canary: {name} has values that are not finite; try capture.compute_dtype=float32")
    with torch.no_grad():
        reference = target.model(tokens[None].to(target.device), output_hidden_states=True)
    tolerance = RELATIVE_TOLERANCE[target.head_weight.dtype]
    for chunk, layer_id in zip(captured.aux.chunk(layout.aux_count, dim=-1), target.aux_layer_ids, strict=True):
        _compare(f"layer {layer_id}", chunk, reference.hidden_states[layer_id + 1][0], tolerance)
    _compare("the output after the final norm", captured.last, reference.hidden_states[-1][0], tolerance)
    own = target.logits(captured.last.to(target.head_weight)).argmax(-1)
    agreement = (own == reference.logits[0].argmax(-1)).float().mean().item()
    if agreement < 0.9:
        raise ValueError(f"canary: head(last) gives the target's own next token at only {agreement:.0%} of positions")


def _compare(what: str, captured: Tensor, reference: Tensor, tolerance: float) -> None:
    error = (captured.float() - reference.float()).norm() / reference.float().norm()
    if error > tolerance:
        raise ValueError(
            f"canary: {what} differs from a plain forward by {error:.2g} (relative), allowed {tolerance:g}"
        )
