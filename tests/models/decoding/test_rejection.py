"""The rejection rule on its own: acceptance, residual, bonus token, and rows where nothing is proposed."""

import pytest
import torch

from models.decoding.rejection import accept, residual
from models.decoding.sampling import Sampling
from models.drafts.base import NO_PROPOSAL

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.2, 0.2, 0.1, 0.5])
BONUS = torch.tensor([0.0, 0.0, 0.25, 0.75])
ROWS = 60_000


def near(share: float, expected: float, trials: int) -> bool:
    """Within five standard deviations."""
    return abs(share - expected) <= 5 * (expected * (1 - expected) / trials) ** 0.5


def test_one_proposal_by_hand():
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(2))
    tokens = torch.full((ROWS, 2), NO_PROPOSAL)
    tokens[:, 0] = sampling.draw(Q.expand(ROWS, -1))
    p, q = torch.stack([P, BONUS]).expand(ROWS, -1, -1), torch.stack([Q, 0 * Q]).expand(ROWS, -1, -1)
    accepted, closing = accept(p, tokens, q, sampling)
    # Sum of min(p, q) is 0.2 + 0.2 + 0.1.
    assert near(float(accepted.double().mean()), 0.5, ROWS)
    assert accepted[tokens[:, 0] == 3].sum() == 0
    rejected, trials = closing[accepted == 0].bincount(minlength=4), int((accepted == 0).sum())
    for token, expected in enumerate([0.6, 0.2, 0.2, 0.0]):  # (0.3, 0.1, 0.1, 0) of 0.5
        assert near(float(rejected[token]) / trials, expected, trials)
    bonus = closing[accepted == 1].bincount(minlength=4)
    assert bonus[:2].sum() == 0
    assert near(float(bonus[3]) / (ROWS - trials), 0.75, ROWS - trials)


def test_rows_end_at_their_own_first_missing_proposal():
    """A row without proposals draws from p; what stands behind the first missing one is never looked at."""
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor([[NO_PROPOSAL, 1, NO_PROPOSAL], [2, NO_PROPOSAL, NO_PROPOSAL], [2, 1, NO_PROPOSAL]])
    tokens = tokens.repeat(ROWS, 1)
    certain = torch.eye(4)
    p = torch.stack([certain[2], certain[1], certain[0]]).expand(len(tokens), -1, -1)
    q = torch.nn.functional.one_hot(tokens.clamp(min=0), 4).float() * (tokens != NO_PROPOSAL).unsqueeze(-1)
    accepted, closing = accept(p, tokens, q, sampling)
    assert accepted.view(ROWS, 3).unique(dim=0).tolist() == [[0, 1, 2]]
    assert closing.view(ROWS, 3).unique(dim=0).tolist() == [[2, 1, 0]]


def test_equal_distributions_accept_everything():
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(4))
    tokens = torch.stack([sampling.draw(Q.expand(ROWS, -1)), torch.full((ROWS,), NO_PROPOSAL)], dim=1)
    both = torch.stack([Q, Q])
    q = both * torch.tensor([[1.0], [0.0]])
    accepted, _ = accept(both.expand(ROWS, -1, -1), tokens, q.expand(ROWS, -1, -1), sampling)
    assert bool((accepted == 1).all())


def test_residual():
    assert residual(P[None], Q[None])[0].tolist() == pytest.approx([0.3, 0.1, 0.1, 0.0])
    assert residual(P[None], P[None] * 1.0000001)[0].tolist() == P.tolist()
