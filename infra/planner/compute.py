"""Floating-point operations of both sides, counted from shapes: two per multiply-add, padding and norms left out.

Attention is counted as far as a causal mask reaches: T / 2 keys on average.
"""

from infra.planner.shapes import DraftShape, TargetShape

BACKWARD = 3.0
"""Forward and backward of a matrix product against its forward: gradients of inputs and of weights."""


def prefill_flops(target: TargetShape, tokens: float) -> float:
    """FLOPs of one sample through the target, without its head, which a capture applies to one token only."""
    attention = 4 * target.attention_width * target.num_layers * tokens / 2
    return tokens * (2 * target.active_parameters + attention)


def draft_flops(
    draft: DraftShape,
    target: TargetShape,
    tokens: int,
    supervised_share: float,
    full_argmax: bool,
    recompute: bool = False,
) -> float:
    """Of one sample's forward, loss and backward.

    `full_argmax`: which positions count is judged by the target's argmax over its whole vocabulary, whose logits hold
    the draft vocabulary's (training.out_of_vocabulary).
    """
    rows = draft.rows(tokens)
    attention = 4 * draft.attention_width * tokens / 2
    again = 1 if recompute and draft.kept.carried is not None else 0
    body = (BACKWARD + again) * (2 * draft.token_parameters * tokens + rows * (2 * draft.row_parameters + attention))
    product = 2.0 * target.hidden_size * draft.vocab_size
    predicted = rows * supervised_share
    loss = predicted * product * (3 if draft.trains_head else 2)
    judged = full_argmax and not draft.whole_vocabulary
    of_target = 2.0 * target.hidden_size * (target.vocab_size if judged else draft.vocab_size)
    return body + loss + of_target * (predicted if draft.target_per_row else tokens * supervised_share)
