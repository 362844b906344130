"""The cost model recovers known costs, and goodput by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.records.acceptance import Acceptance
from infra.records.goodput import CostFit, StepTime
from models.decoding.goodput import FittedCosts, fit, goodput_table, predict, rates_of

GRID = [(batch, tokens) for batch in (1, 2, 4, 8, 16, 32) for tokens in (1, 2, 3, 5, 8)]
amount = st.floats(1e-4, 1.0)


def costs(
    constant: float,
    per_text: float,
    per_token: float,
    knee: float,
    beyond: float,
    several=(0.0, 0.0),
    together=0.0,
    position=0.0,
) -> CostFit:
    return CostFit(
        constant=constant,
        per_text=per_text,
        per_token=per_token,
        knee=knee,
        per_token_beyond=beyond,
        several=several[0],
        several_per_text=several[1],
        together=together,
        per_position=position,
    )


@settings(max_examples=12, deadline=None)
@given(
    amounts=st.tuples(
        amount, amount, amount, st.sampled_from([8.0, 16.0, 40.0]), amount, st.tuples(amount, amount), amount, amount
    )
)
def test_known_costs_are_recovered(amounts):
    """A knee at a total that was measured: everything is predicted, measured or not."""
    true = costs(*amounts)
    found = fit([StepTime(batch=b, tokens=n, seconds=true.seconds(b, n)) for b, n in GRID])
    for batch, tokens in ((3, 4), (24, 6), (64, 3)):
        assert found.seconds(batch, tokens) == pytest.approx(true.seconds(batch, tokens), rel=1e-3)


def test_noise_never_makes_a_cost_negative():
    """More texts that look cheaper than fewer are the same texts to the model."""
    found = fit([StepTime(batch=b, tokens=1, seconds=s) for b, s in ((1, 1.05), (2, 1.0), (4, 0.98), (8, 1.01))])
    assert min(found.constant, found.per_text, found.per_token, found.per_token_beyond) >= 0
    assert found.seconds(1, 1) == pytest.approx(1.01, rel=0.02)


def test_goodput_by_hand():
    """Two texts, lookahead 2, acceptance 0.8 and 0.5: 1 + 0.8 + 0.4 tokens each, in 1.2 s and drafting of 0.2 s."""
    target, draft = costs(0.6, 0.0, 0.1, 0.0, 0.0), costs(0.0, 0.0, 0.05, 0.0, 0.0)
    found = predict(FittedCosts(target, draft), [0.8, 0.5], 2, 2)
    assert found.tokens_per_step == pytest.approx(2.2)
    assert found.step_s == pytest.approx(1.2 + 0.2)
    assert found.tokens_per_s == pytest.approx(4.4 / 1.4)
    assert predict(FittedCosts(target, draft), [0.8, 0.5], 2, 0).step_s == pytest.approx(0.8)


def test_the_table_turns_from_many_proposals_to_none():
    """Beyond 16 tokens at once every token costs, so under a high load nothing should be proposed."""
    found = goodput_table(
        FittedCosts(costs(1.0, 0.0, 0.0, 16.0, 0.06), costs(0.0, 0.0, 0.0, 0.0, 0.0)), [0.6, 0.5, 0.4], [1, 4, 8, 32]
    )
    assert found.best == {1: 3, 4: 3, 8: 1, 32: 0}
    assert len(found.rows) == 16


def test_rates_end_where_nothing_was_offered():
    acceptance = Acceptance(conversations=1, length={3: 1.5}, steps={3: 9}, by_position=(0.5, 0.25, None))
    assert rates_of(acceptance) == (0.5, 0.25)
