"""The rejection rule on its own: acceptance, residual, bonus token, siblings, and rows where nothing is proposed."""

import pytest
import torch
from torch import Tensor

from models.decoding.rejection import accept, residual
from models.drafts.sampling import Sampling, chances
from models.drafts.trees import NO_PROPOSAL, ROOT

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.2, 0.2, 0.1, 0.5])
BONUS = torch.tensor([0.0, 0.0, 0.25, 0.75])
ROWS = 60_000


def near(share: float, expected: float, trials: int) -> bool:
    """Within five standard deviations."""
    return abs(share - expected) <= 5 * (expected * (1 - expected) / trials) ** 0.5


def uniform(tokens: Tensor, sampling: Sampling) -> Tensor:
    return chances([sampling] * len(tokens), [tokens.shape[1] + 1] * len(tokens), torch.device("cpu"))


def chain(count: int, rows: int = ROWS) -> Tensor:
    return torch.arange(ROOT, count - 1).expand(rows, -1)


def test_one_proposal_by_hand():
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(2))
    tokens = sampling.draw(Q.expand(ROWS, -1)).unsqueeze(1)
    p, q = torch.stack([P, BONUS]).expand(ROWS, -1, -1), Q.expand(ROWS, 1, -1)
    accepted, closing = accept(p, tokens, chain(1), q, uniform(tokens, sampling))
    accepted = accepted[:, 0]
    # Sum of min(p, q) is 0.2 + 0.2 + 0.1.
    assert near(float(accepted.double().mean()), 0.5, ROWS)
    assert not accepted[tokens[:, 0] == 3].any()
    rejected, trials = closing[~accepted].bincount(minlength=4), int((~accepted).sum())
    for token, expected in enumerate([0.6, 0.2, 0.2, 0.0]):  # (0.3, 0.1, 0.1, 0) of 0.5
        assert near(float(rejected[token]) / trials, expected, trials)
    bonus = closing[accepted].bincount(minlength=4)
    assert bonus[:2].sum() == 0
    assert near(float(bonus[3]) / (ROWS - trials), 0.75, ROWS - trials)


def test_two_siblings_by_hand():
    """Token 1, then token 0, both with certainty: 0.3, then 0.5 of the 0.7 left, then what neither is."""
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(2))
    tokens, parents = torch.tensor([[1, 0]]).expand(ROWS, -1), torch.full((ROWS, 2), ROOT)
    q = torch.eye(4)[tokens]
    after = torch.stack([P, torch.eye(4)[2], torch.eye(4)[3]]).expand(ROWS, -1, -1)
    accepted, closing = accept(after, tokens, parents, q, uniform(tokens, sampling))
    first, second = accepted.T
    assert not (first & second).any()
    assert near(float(first.double().mean()), 0.3, ROWS)
    assert near(float(second.double().mean()), 0.5, ROWS)
    assert closing[first].unique().tolist() == [2]
    assert closing[second].unique().tolist() == [3]
    assert closing[~first & ~second].unique().tolist() == [2], "token 3 has probability 0"


def test_below_a_rejected_token_nothing_is_accepted():
    """A sure child of a token that the target cannot write, and one of its sibling."""
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([[3, 0, 2, 1]])
    parents = torch.tensor([[ROOT, ROOT, 0, 1]])
    sure = torch.eye(4)
    p = torch.stack([sure[0], sure[2], sure[1], sure[3], sure[3]]).unsqueeze(0)
    accepted, closing = accept(p, tokens, parents, sure[tokens], uniform(tokens, sampling))
    assert accepted.tolist() == [[False, True, False, True]]
    assert closing.tolist() == [3]


def test_rows_end_at_their_own_first_missing_proposal():
    """A row without proposals draws from p; what stands behind the first missing one is never looked at."""
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor([[NO_PROPOSAL, 1], [2, NO_PROPOSAL], [2, 1]]).repeat(ROWS, 1)
    certain = torch.eye(4)
    p = torch.stack([certain[2], certain[1], certain[0]]).expand(len(tokens), -1, -1)
    q = certain[tokens.clamp(min=0)] * (tokens != NO_PROPOSAL).unsqueeze(-1)
    accepted, closing = accept(p, tokens, chain(2, len(tokens)), q, uniform(tokens, sampling))
    assert accepted.sum(-1).view(ROWS, 3).unique(dim=0).tolist() == [[0, 1, 2]]
    assert closing.view(ROWS, 3).unique(dim=0).tolist() == [[2, 1, 0]]


def test_no_proposals_at_all_draw_from_the_target():
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(3))
    nothing = torch.empty(ROWS, 0, dtype=torch.long)
    accepted, closing = accept(
        P.expand(ROWS, 1, -1), nothing, nothing, torch.empty(ROWS, 0, 4), uniform(nothing, sampling)
    )
    assert accepted.shape == (ROWS, 0)
    assert near(float((closing == 0).double().mean()), 0.5, ROWS)


def test_equal_distributions_accept_everything():
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(4))
    tokens = sampling.draw(Q.expand(ROWS, -1)).unsqueeze(1)
    both = torch.stack([Q, Q]).expand(ROWS, -1, -1)
    accepted, _ = accept(both, tokens, chain(1), both[:, :1], uniform(tokens, sampling))
    assert bool(accepted.all())


def test_residual():
    assert residual(P[None], Q[None])[0].tolist() == pytest.approx([0.3, 0.1, 0.1, 0.0])
    assert residual(P[None], P[None] * 1.0000001)[0].tolist() == P.tolist()
