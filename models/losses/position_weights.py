"""Position weights of a block, where later proposals count only if the earlier ones were accepted."""

import torch
from torch import Tensor


@torch.no_grad()
def token_probabilities(hidden: Tensor, head: Tensor, tokens: Tensor, chunk_tokens: int) -> Tensor:
    """What a draft gives to known tokens.

    Args:
        hidden: `[Q, h]` draft hidden states (after its norm).
        head: `[V, h]` draft head.
        tokens: `[Q]` int64.
        chunk_tokens: rows whose logits are alive at once.

    Returns:
        `[Q]` float32 (float64 for float64 drafts).
    """
    found = []
    compute_head = head.to(hidden.dtype)
    for rows, wanted in zip(hidden.split(chunk_tokens), tokens.split(chunk_tokens), strict=True):
        logits = rows @ compute_head.T
        logits = logits if logits.dtype == torch.float64 else logits.float()
        found.append((logits.gather(-1, wanted[:, None]).squeeze(-1) - logits.logsumexp(-1)).exp())
    return torch.cat(found)


def decay_weights(count: int, gamma: float, device: torch.device) -> Tensor:
    """`[count]` float32 `exp(-k / gamma)`, k from 0 (DFlash, arXiv 2602.06036, equation 4)."""
    return (-torch.arange(count, device=device, dtype=torch.float32) / gamma).exp()


def dpace_weights(confidences: Tensor, there: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810, equations 7 and 8).

    With c_i = (1 - alpha) * confidence_i + alpha, position j weighs the sum over m >= j of c_1 * ... * c_m: the part
    of the expected accepted length that is lost where j is rejected.

    Args:
        confidences: `[A, S]` probability that each position is accepted where those before it were.
        there: `[A, S]` bool; false from some position on to the end of its row.
        alpha: smoothing, in (0, 1].

    Returns:
        `[A, S]` weights, 0 where nothing is there.
    """
    reached = torch.where(there, (1 - alpha) * confidences + alpha, 0.0).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)
