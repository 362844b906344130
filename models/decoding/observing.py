"""The target's most likely tokens after each position, as observing sources receive them."""

import torch
from torch import Tensor

from models.drafts.proposals import Likeliest
from models.targets.model import TargetModel

ROWS = 64
"""Positions whose logits are alive at once: 67 MB for 262,144 tokens."""


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """The `count` greatest of each row of `[n, V]` logits; fewer where the vocabulary is smaller."""
    best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return Likeliest(best.indices, best.values - logits.logsumexp(-1, keepdim=True))


def likeliest_after(target: TargetModel, last: Tensor, count: int) -> Likeliest:
    """The most likely tokens, from `[n, H]` hidden states after the final norm."""
    parts = [likeliest(target.logits(rows), count) for rows in last.split(ROWS)]
    return Likeliest(torch.cat([part.tokens for part in parts]), torch.cat([part.log_probabilities for part in parts]))
