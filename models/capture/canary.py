"""The canary: a generator is ready only after one of its captures agreed with an independent forward."""

import torch
from torch import Tensor

from infra.refusal import Refusal
from models.targets.layout import HiddenStateLayout, SampleError
from models.targets.model import HiddenStates, TargetModel
from models.targets.weights import TargetHead

RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Tolerance by the target's compute data type."""
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 4e-3}
"""Rounding by the data type of stored hidden states."""


@torch.no_grad()
def check_capture(target: TargetModel, captured: HiddenStates, tokens: Tensor, layout: HiddenStateLayout) -> None:
    """Compare `captured`, the hidden states of `tokens` `[T]`, with those that transformers returns.

    Raises Refusal that names the difference: shapes, values of a layer, the final norm, or the predicted tokens.
    """
    try:
        layout.check(captured, len(tokens))
    except SampleError as error:
        raise Refusal(f"canary: {error}") from None
    reference = target.model(tokens[None].to(target.device), output_hidden_states=True)
    tolerance = RELATIVE_TOLERANCE[target.head_weight.dtype] + ROUNDING[captured.last.dtype]
    for chunk, layer_id in zip(captured.aux.chunk(layout.aux_count, dim=-1), target.aux_layer_ids, strict=True):
        # For the last layer transformers returns the output after the final norm.
        last = layer_id + 1 == len(target.body.layers)
        seen = target.body.norm(chunk.to(target.head_weight)) if last else chunk
        _compare(f"layer {layer_id}", seen, reference.hidden_states[layer_id + 1][0], tolerance)
    _compare("the output after the final norm", captured.last, reference.hidden_states[-1][0], tolerance)
    own = target.logits(captured.last.to(target.head_weight)).argmax(-1)
    agreement = (own == reference.logits[0].argmax(-1)).float().mean().item()
    if agreement < 0.9:
        raise Refusal(f"canary: head(last) gives the target's own next token at only {agreement:.0%} of positions")


def check_next_token(head: TargetHead, last: Tensor, token: int) -> None:
    """Raise Refusal unless `token`, an engine's greedy choice, is also the head's choice for its `last` `[H]`.

    A token with nearly the highest logit is accepted too, because rounding may swap the two.
    """
    logits = head.logits(last[None].to(head.head))[0]
    tolerance = RELATIVE_TOLERANCE[head.head.dtype] + ROUNDING[last.dtype]
    gap = (logits.max() - logits[token]) / (logits.max() - logits.mean())
    if not gap <= tolerance:
        raise Refusal(
            f"canary: the engine's next token is {token}, head(last) says {int(logits.argmax())}: what was captured is "
            "not the output after the final norm"
        )


def _compare(what: str, captured: Tensor, reference: Tensor, tolerance: float) -> None:
    error = (captured.float() - reference.float()).norm() / reference.float().norm()
    if error > tolerance:
        raise Refusal(f"canary: {what} differs from a plain forward by {error:.2g} (relative), allowed {tolerance:g}")
