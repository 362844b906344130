"""Weights of a block's positions against what they are said to be."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.losses.position_weights import decay_weights, dpace_weights, token_probabilities


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), min_size=1, max_size=3),
    count=st.integers(0, 4),
    alpha=st.floats(0.05, 1),
)
def test_dpace_weights_are_what_a_rejection_would_cost(rows, count, alpha):
    confidences = torch.tensor(rows, dtype=torch.float64)
    there = (torch.arange(4) < count).expand(len(rows), 4)
    found = dpace_weights(confidences, there, alpha)
    for row, weights in zip(rows, found.tolist(), strict=True):
        smooth = [(1 - alpha) * one + alpha for one in row[:count]]
        # The expected accepted length, less what it is where position j never is accepted.
        expected = [sum(math.prod(smooth[: m + 1]) for m in range(j, count)) for j in range(4)]
        assert weights == pytest.approx(expected, abs=1e-12)


def test_decay():
    assert decay_weights(3, 4.0, torch.device("cpu")).tolist() == pytest.approx([1, math.exp(-0.25), math.exp(-0.5)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_probabilities(dtype):
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(7, 5, generator=g).to(dtype), torch.randn(11, 5, generator=g)
    tokens = torch.randint(11, (7,), generator=g)
    found = token_probabilities(hidden, head, tokens, 3)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    logits = (hidden @ head.to(dtype).T).double()
    expected = [float(row.softmax(-1)[token]) for row, token in zip(logits, tokens, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-3)
