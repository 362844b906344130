"""The rejection rule of speculative sampling: the text follows the target, whatever the draft. Runs in benchmarks.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): a token x drawn from q is accepted with
probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from max(p - q, 0), normalised.
"""

import torch
from torch import Tensor

from models.decoding.sampling import Sampling
from models.drafts.base import NO_PROPOSAL


def accept(p: Tensor, tokens: Tensor, q: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Decide R independent verification steps.

    The last place of a step stands for the bonus token: nothing is proposed there, so nothing is accepted, and what
    "replaces" it is a draw from p itself.

    Args:
        p: `[R, n, V]` float, the target's distribution at each place, after temperature and top-p.
        tokens: `[R, n]` int64 proposals, the first `NO_PROPOSAL` of a row ends them; every row has one.
        q: `[R, n, V]` float, what each proposal was drawn from; zeros where there is none.
        sampling: gives the randomness.

    Returns:
        `[R]` int64 number of accepted proposals, and `[R]` int64 the token that closes the step.
    """
    places = tokens.clamp(min=0).unsqueeze(-1)
    target, draft = p.gather(-1, places).squeeze(-1), q.gather(-1, places).squeeze(-1)
    kept = (tokens != NO_PROPOSAL) & (sampling.uniform(draft) * draft < target)
    accepted = kept.long().cumprod(-1).sum(-1)
    rows = torch.arange(len(p), device=p.device)
    return accepted, sampling.draw(residual(p[rows, accepted], q[rows, accepted]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """`[R, V]` what p has more of than q, not normalised."""
    left = (p - q).clamp(min=0)
    # Only rounding rejects a token where p has nothing more than q anywhere: then the two are equal.
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
