"""The drift test: what it promises for any traffic, and how fast it sees a fall."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.drift.sequential import LEARNED_WINDOWS, DriftTest, Reference, Statistic

REQUESTS = 400


def requests(seed: int = 0, length: float = 2.4) -> Reference:
    """Requests of 10 to 80 steps whose own acceptance differs from request to request."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(10, 80, size=REQUESTS)
    rate = np.clip(rng.normal((length - 1) / 4, 0.06, size=REQUESTS), 0.01, 0.99)
    return Reference(np.stack([steps + rng.binomial(4 * steps, rate), steps], axis=1).astype(np.float64))


def alarms(test: DriftTest, rows: np.ndarray, per_window: int, windows: int, share: float = 1.0) -> int:
    rng, found, statistic = np.random.default_rng(1), 0, Statistic()
    for _ in range(windows):
        tokens, steps = rows[rng.integers(len(rows), size=per_window)].sum(axis=0)
        statistic = test.after(statistic, int(tokens * share), int(steps))
        if test.alarms(statistic):
            found, statistic = found + 1, statistic.anew()
    return found


def test_e_values_average_one_at_the_edge_of_no_fall():
    reference = requests()
    test = DriftTest(reference, 0.1, 5000)
    tokens, steps = reference.requests.T
    edge = tokens - (reference.length - reference.lower_bound) * steps
    assert np.exp(test.theta * (test.middle * steps - edge)).mean() == pytest.approx(1.0, abs=1e-9)
    assert np.exp(test.theta * (test.middle * steps - tokens)).mean() < 1.0
    assert test.theta > 0
    assert 0.9 * reference.length < test.middle < reference.lower_bound < reference.length


@pytest.mark.parametrize("per_window", [5, 20, 80])
def test_false_alarms_are_rarer_than_stated(per_window: int):
    """40,000 windows at a stated run length of 500: at most 80 alarms are promised on average."""
    assert alarms(DriftTest(requests(), 0.1, 500), requests().requests, per_window, 40_000) <= 80


def test_the_run_length_holds_for_the_requests_that_the_benchmark_did_not_see():
    """The reference is another sample of the same traffic; its lower bound pays for that."""
    found = [alarms(DriftTest(requests(seed), 0.1, 500), requests(99).requests, 20, 4000) for seed in range(10)]
    assert sum(count > 8 for count in found) <= 2


@pytest.mark.parametrize(("per_window", "within"), [(5, 60), (20, 20), (80, 8)])
def test_a_fall_of_a_tenth_is_seen(per_window: int, within: int):
    test, statistic = DriftTest(requests(), 0.1, 5000), Statistic()
    rng, rows = np.random.default_rng(2), requests().requests
    for count in range(-LEARNED_WINDOWS, within):
        tokens, steps = rows[rng.integers(len(rows), size=per_window)].sum(axis=0)
        statistic = test.after(statistic, round(tokens * (0.9 if count >= 0 else 1.0)), int(steps))
        if test.alarms(statistic):
            break
    assert test.alarms(statistic), count


def test_traffic_that_varies_more_than_requests_do_raises_no_more_alarms():
    """Every other window is of another kind, 8 % better or worse."""
    test, statistic, rng, found = DriftTest(requests(), 0.1, 500), Statistic(), np.random.default_rng(3), 0
    rows = requests().requests
    for _ in range(20_000):
        tokens, steps = rows[rng.integers(len(rows), size=40)].sum(axis=0)
        statistic = test.after(statistic, round(tokens * rng.choice([0.92, 1.08])), int(steps))
        if test.alarms(statistic):
            found, statistic = found + 1, statistic.anew()
    assert found <= 40
    assert statistic.dispersion > 1


WINDOWS = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 5000)), min_size=1, max_size=40)


@given(WINDOWS)
def test_the_statistic_is_what_its_definition_says(windows: list[tuple[int, int]]):
    """R = (1 + R) e, in logarithms, with e = 1 while the traffic's dispersion is learned."""
    test, statistic, value = DriftTest(requests(), 0.1, 5000), Statistic(), 0.0
    for index, (tokens, steps) in enumerate(windows):
        dispersion = statistic.dispersion
        statistic = test.after(statistic, tokens, steps)
        assert statistic.windows == index + 1
        evidence = test.theta / dispersion * (test.middle * steps - tokens) if index >= LEARNED_WINDOWS else 0.0
        if abs(evidence) > 500 or value > exp(500):
            break
        value = (1 + value) * exp(evidence)
        assert statistic.log_value == pytest.approx(log(value) if value else float("-inf"), abs=1e-6, rel=1e-6)
        assert test.share(statistic) >= 0


@given(WINDOWS, st.integers(0, 5000))
def test_a_worse_window_never_speaks_against_a_fall(windows: list[tuple[int, int]], fewer: int):
    test, before = DriftTest(requests(), 0.1, 5000), Statistic()
    for tokens, steps in windows[:-1]:
        before = test.after(before, tokens, steps)
    tokens, steps = windows[-1]
    values = [test.after(before, count, steps).log_value for count in (tokens, max(0, tokens - fewer))]
    assert None not in values
    assert values == sorted(values)  # type: ignore[type-var]


@given(WINDOWS)
def test_a_restart_goes_on_where_it_was(windows: list[tuple[int, int]]):
    """The statistic survives JSON between any two windows."""
    test, whole, broken = DriftTest(requests(), 0.1, 5000), Statistic(), Statistic()
    for tokens, steps in windows:
        whole = test.after(whole, tokens, steps)
        broken = Statistic.model_validate_json(test.after(broken, tokens, steps).model_dump_json())
    assert broken == whole


def test_rough_references_are_refused_in_words():
    rows = requests().requests
    with pytest.raises(ValueError, match="at least 20"):
        Reference(rows[:5])
    with pytest.raises(ValueError, match=r"set benchmark.prompts to more than \d+"):
        DriftTest(Reference(rows[:20]), 0.01, 5000)
    with pytest.raises(ValueError, match="no verification step"):
        Reference.of([(0, 0)] * 30)
    with pytest.raises(ValueError, match="same acceptance length"):
        _ = DriftTest(Reference.of([(20, 10)] * 30), 0.1, 5000).theta


def test_a_benchmark_whose_conversations_hardly_differ():
    """All of them lie above the middle of the fall: X is never positive."""
    test = DriftTest(Reference.of([(22, 10), (23, 10), (24, 10)] * 50), 0.1, 5000)
    statistic = Statistic()
    for _ in range(LEARNED_WINDOWS):
        statistic = test.after(statistic, 2300, 1000)
    assert test.after(statistic, 2300, 1000).log_value < 0.1
    assert test.alarms(test.after(statistic, 2000, 1000))


def test_a_reference_of_more_prompts_is_as_large_as_was_asked_for():
    with pytest.raises(ValueError, match=r"more than (\d+)") as refused:
        DriftTest(Reference(requests().requests[:40]), 0.02, 5000)
    asked = int(str(refused.value).split("more than ")[1].split()[0])
    repeated = np.concatenate([requests(seed).requests for seed in range(-(-asked // REQUESTS) + 1)])
    DriftTest(Reference(repeated), 0.02, 5000)
