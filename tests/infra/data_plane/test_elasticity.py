"""When generators come and go: what looks at the bottleneck speak for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.data_plane.bottleneck import LOOKS, Elasticity
from infra.records.data_path import SideRates

PATIENCE_S = 60.0
EVERY_S = 20.0
FRESH = Elasticity(count=1, max_count=3, patience_s=PATIENCE_S)
STARVED = {"data_wait_share": 0.4, "inference": 50.0}
FED = {"data_wait_share": 0.0, "inference": 900.0}


def rates(generators: int, **sides: float | None) -> SideRates:
    known = {"inference": 100.0, "transport": 9000.0, "training": 100.0, "data_wait_share": 0.0} | sides
    return SideRates.model_validate(known | {"generators": generators, "ranks": 1})


def leaning(generators: int, seen: SideRates) -> int:
    return FRESH.after(0.0, seen, generators).leaning


@pytest.mark.parametrize(
    ("generators", "seen", "expected"),
    [
        (1, rates(1, **STARVED), 1),
        (2, rates(2, **STARVED), 1),
        (3, rates(3, **STARVED), 0),  # as many as there may be
        (2, rates(1, **STARVED), 0),  # the second one has captured nothing yet
        (1, rates(1, data_wait_share=0.4, inference=500.0, transport=90.0), 0),  # the transport is slow
        (1, rates(0, data_wait_share=0.9, inference=None, transport=None), 0),  # nothing was captured lately
        (1, rates(1, training=None, data_wait_share=0.9), 0),
        (1, rates(1, **FED), 0),  # as few as there may be
        (2, rates(2, **FED), -1),
        (3, rates(3, **FED), -1),
        (2, rates(2, inference=260.0), -1),  # one gives 130 less the transfers
        (2, rates(2, inference=230.0), 0),  # one would be too slow soon
        (2, rates(2, inference=900.0, transport=200.0), 0),  # one would wait for its transfers
        (2, rates(3, inference=300.0), 0),  # the rates are still those of three
    ],
)
def test_what_one_look_speaks_for(generators: int, seen: SideRates, expected: int) -> None:
    assert leaning(generators, seen) == expected


@pytest.mark.parametrize(("generators", "sides", "expected"), [(1, STARVED, 1), (2, FED, -1)])
def test_a_side_must_be_the_slow_one_for_a_while(generators: int, sides: dict[str, float], expected: int) -> None:
    rule, at, changes = FRESH, 0.0, []
    while at <= PATIENCE_S:
        rule = rule.after(at, rates(generators, **sides), generators)
        changes.append(rule.change)
        at += EVERY_S
    assert changes == [0, 0, 0, expected]


def test_one_look_that_differs_begins_the_while_again() -> None:
    rule, changes = FRESH, []
    for number, sides in enumerate([STARVED] * 3 + [FED] + [STARVED] * 4):
        rule = rule.after(EVERY_S * number, rates(1, **sides), 1)
        changes.append(rule.change)
    assert changes == [0] * 7 + [1]


def test_two_looks_are_too_few_however_far_apart() -> None:
    rule = FRESH.after(0.0, rates(1, **STARVED), 1).after(10 * PATIENCE_S, rates(1, **STARVED), 1)
    assert (LOOKS, rule.change) == (3, 0)
    assert rule.after(11 * PATIENCE_S, rates(1, **STARVED), 1).change == 1


def test_what_cannot_be_kept_running_is_not_tried_for_ever() -> None:
    assert [FRESH.without_one().max_count, FRESH.without_one().without_one().without_one().max_count] == [2, 1]


@given(
    looks=st.lists(
        st.tuples(st.floats(0, 200), st.floats(0, 1), st.floats(1, 1e4), st.floats(1, 1e4), st.floats(1, 1e4)),
        max_size=60,
    ),
    count=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_the_bounds_hold_and_changes_are_rare(
    looks: list[tuple[float, float, float, float, float]], count: int, more: int
) -> None:
    rule, generators, at, changed_at = Elasticity(count, count + more, PATIENCE_S), count, 0.0, 0.0
    for passed, wait_share, inference, transport, training in looks:
        at += passed
        seen = rates(
            generators, data_wait_share=wait_share, inference=inference, transport=transport, training=training
        )
        rule = rule.after(at, seen, generators)
        if rule.change:
            assert at - changed_at >= PATIENCE_S
            generators, changed_at, rule = generators + rule.change, at, rule.afresh()
        assert count <= generators <= count + more


@given(each=st.floats(1, 1e4), training=st.floats(1, 1e4), most=st.integers(2, 8))
def test_a_steady_load_comes_to_rest(each: float, training: float, most: int) -> None:
    """Whatever the speeds are: never added and taken away by turns."""
    rule, generators, changes = Elasticity(1, most, PATIENCE_S), 1, []
    for number in range(5 * LOOKS * most):
        supply = each * generators
        waits = max(0.0, 1 - supply / training)
        rule = rule.after(
            EVERY_S * number,
            rates(generators, data_wait_share=waits, inference=supply, transport=1e9, training=training),
            generators,
        )
        if rule.change:
            generators += rule.change
            changes.append(rule.change)
            rule = rule.afresh()
    assert changes == [1] * (generators - 1)
    assert generators == most or each * generators >= 0.95 * training
