"""The rejection rule of speculative sampling: the text follows the target, whatever the draft.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): a token x drawn from q is accepted with
probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from max(p - q, 0), normalised. In a tree
(SpecInfer, arXiv 2305.09781; recursive rejection, arXiv 2402.14160) the next sibling is tried against what is left of p
after a rejection, and the text continues below the first one that is accepted.
"""

import torch
from torch import Tensor

from models.drafts.sampling import draw_by
from models.drafts.trees import NO_PROPOSAL, ROOT


def accept(p: Tensor, tokens: Tensor, parents: Tensor, q: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """Decide R independent verification steps over trees of at most n proposals.

    Args:
        p: `[R, n + 1, V]` float, the target's distribution after the last emitted token and after each proposal, after
            temperature, top-k and top-p.
        tokens: `[R, n]` int64 proposals; `NO_PROPOSAL` where a row has fewer.
        parents: `[R, n]` int64, each proposal's parent, which stands before it, or `ROOT`.
        q: `[R, n, V]` float, what each proposal was drawn from given its ancestors and the siblings before it.
        chances: `[R, n + 1]` float64 in [0, 1): the first draws the token that closes the step, the others decide the
            proposals, one each.

    Returns:
        `[R, n]` bool, the accepted proposals (a path from the root), and `[R]` int64 the token that closes the step.
    """
    left, here = p[:, 0], torch.full((len(p),), ROOT, device=p.device)
    accepted = torch.zeros_like(tokens, dtype=torch.bool)
    # A child is tried only while its parent is the last accepted token, and no sibling before it was accepted.
    for node in range(tokens.shape[1]):
        tried = (parents[:, node] == here) & (tokens[:, node] != NO_PROPOSAL)
        if not bool(tried.any()):
            continue
        place = tokens[:, node].clamp(min=0).unsqueeze(-1)
        target, draft = left.gather(-1, place).squeeze(-1), q[:, node].gather(-1, place).squeeze(-1)
        kept = tried & (chances[:, node + 1] * draft < target)
        rest = residual(left, q[:, node])
        left = torch.where((tried & ~kept).unsqueeze(-1), rest / rest.sum(-1, keepdim=True), left)
        left = torch.where(kept.unsqueeze(-1), p[:, node + 1], left)
        here = torch.where(kept, node, here)
        accepted[:, node] = kept
    return accepted, draw_by(left, chances[:, 0])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """`[R, V]` what p has more of than q, not normalised."""
    left = (p - q).clamp(min=0)
    # Only rounding rejects a token where p has nothing more than q anywhere: then the two are equal.
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
