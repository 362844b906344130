import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from models.benchmark.paired import length_interval, paired_difference

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "gate_records.json"
CONVERSATION = st.tuples(st.integers(0, 40), st.integers(0, 200)).map(lambda it: (float(it[0] + it[1]), float(it[0])))
PAIRS = st.lists(st.tuples(CONVERSATION, CONVERSATION), min_size=2, max_size=12)


def slow_reference(pairs: list[tuple[tuple[float, float], tuple[float, float]]], cost: float) -> tuple[float, float]:
    """Log ratio and its jackknife error, by loops."""

    def log_ratio(kept: list[tuple[tuple[float, float], tuple[float, float]]]) -> float:
        lengths = []
        for side in (0, 1):
            tokens, steps = sum(pair[side][0] for pair in kept), sum(pair[side][1] for pair in kept)
            lengths.append(tokens / steps if steps else 1.0)
        return float(np.log(lengths[0] / lengths[1] / cost))

    left_out = [log_ratio(pairs[:row] + pairs[row + 1 :]) for row in range(len(pairs))]
    mean, number = sum(left_out) / len(pairs), len(pairs)
    return log_ratio(pairs), ((number - 1) / number * sum((each - mean) ** 2 for each in left_out)) ** 0.5


@given(pairs=PAIRS, cost=st.floats(0.2, 5.0))
def test_equals_a_slow_reference(pairs: list[tuple[tuple[float, float], tuple[float, float]]], cost: float):
    # Tokens without a step do not occur.
    pairs = [tuple((t, s) if s else (0.0, 0.0) for t, s in pair) for pair in pairs]
    found = paired_difference(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]), cost)
    log_ratio, error = slow_reference(pairs, cost)
    assert found.log_ratio == pytest.approx(log_ratio, abs=1e-9)
    assert found.standard_error == pytest.approx(error, abs=1e-9)
    reach = stats.t.ppf(0.975, len(pairs) - 1) * error
    assert found.lower_bound == pytest.approx(np.expm1(log_ratio - reach), abs=1e-6)
    assert found.estimate == pytest.approx(np.expm1(log_ratio), abs=1e-9)
    if error > 1e-6:
        assert found.p(found.quantile(0.2)) == pytest.approx(0.8, abs=1e-6) or not -1 < found.quantile(0.2) < 1e9


@given(pairs=PAIRS, factor=st.integers(2, 9))
def test_sides_change_places_and_scale_does_not_matter(pairs, factor: int):
    one, other = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    there, back = paired_difference(one, other), paired_difference(other, one)
    assert there.log_ratio == pytest.approx(-back.log_ratio, abs=1e-9)
    assert there.standard_error == pytest.approx(back.standard_error, abs=1e-9)
    scaled = paired_difference(one * factor, other)
    assert scaled.log_ratio == pytest.approx(there.log_ratio, abs=1e-9)
    order = np.argsort(one[:, 0])
    assert paired_difference(one[order], other[order]).standard_error == pytest.approx(there.standard_error, abs=1e-9)


def conversations(rng: np.random.Generator, number: int, lift: float) -> tuple[np.ndarray, np.ndarray]:
    """Challenger and champion of a common difficulty per conversation; ratio of expectations is (2 + lift) / 2."""
    difficulty = rng.uniform(0.5, 1.5, number)
    steps = rng.integers(10, 40, (2, number))
    champion = rng.poisson(steps[0] * 2.0 * difficulty)
    challenger = rng.poisson(steps[1] * (2.0 + lift) * difficulty)
    return np.stack([challenger, steps[1]], 1).astype(float), np.stack([champion, steps[0]], 1).astype(float)


@pytest.mark.parametrize("number", [8, 16, 60])
def test_lower_bound_covers_the_truth_as_often_as_it_says(number: int):
    rng, truth, trials = np.random.default_rng(1), 0.15, 4000
    covered = sum(
        paired_difference(*conversations(rng, number, 2.0 * truth)).lower_bound <= truth for _ in range(trials)
    )
    # Four standard errors of 4,000 trials are 1 point.
    assert covered / trials == pytest.approx(0.975, abs=0.01)


def test_a_draft_against_itself_is_rarely_better():
    """Real counts, each side on conversations of its own, so that nothing is paired away: 2.5 % at margin 0."""
    rows = np.array(json.loads(RECORDS.read_text())["greedy"], dtype=float)
    rng, gates = np.random.default_rng(2), 4000
    for number in (16, 32, 128):
        better = sum(
            paired_difference(rng.choice(rows, number), rng.choice(rows, number)).lower_bound > 0 for _ in range(gates)
        )
        assert better / gates == pytest.approx(0.025, abs=0.01)


def test_smallest_detectable_is_detected_four_times_of_five():
    rng = np.random.default_rng(3)
    calm = paired_difference(*conversations(rng, 20_000, 0.0))
    error = calm.standard_error * (20_000 / 60) ** 0.5
    lift = float(np.expm1(error * (stats.t.ppf(0.975, 59) + 0.841621)))
    found = sum(paired_difference(*conversations(rng, 60, 2 * lift)).lower_bound > 0 for _ in range(600))
    assert found / 600 == pytest.approx(0.8, abs=0.07)
    assert calm.smallest_detectable(0.01) == pytest.approx(1.01 * np.exp(calm.standard_error * 2.8017) - 1, rel=1e-3)


def test_as_many_prompts_as_needed_show_the_difference_four_times_of_five():
    rng = np.random.default_rng(4)
    known = paired_difference(*conversations(rng, 20_000, 0.1))
    number = known.prompts_needed(0.0)
    assert number is not None
    assert 40 < number < 2_000
    found = sum(paired_difference(*conversations(rng, number, 0.1)).lower_bound > 0 for _ in range(600))
    assert found / 600 == pytest.approx(0.8, abs=0.07)
    assert known.prompts_needed(known.estimate + 1e-6) is None


def test_pairing_narrows_what_unpaired_conversations_would_show():
    rng = np.random.default_rng(4)
    challenger, champion = conversations(rng, 60, 0.1)
    paired = paired_difference(challenger, champion)
    shuffled = paired_difference(challenger[rng.permutation(60)], champion)
    assert paired.estimate == pytest.approx(shuffled.estimate)
    assert paired.standard_error < 0.8 * shuffled.standard_error


def test_a_ratio_of_sums_not_a_mean_of_ratios():
    challenger, champion = np.array([[300.0, 100.0], [1.0, 1.0]]), np.array([[200.0, 100.0], [1.0, 1.0]])
    assert paired_difference(challenger, champion).estimate == pytest.approx(301 / 201 - 1)


def test_conversations_without_steps_are_nothing_accepted():
    challenger = np.array([[0.0, 0.0], [30.0, 10.0]])
    result = paired_difference(challenger, np.array([[10.0, 10.0], [10.0, 10.0]]))
    assert result.estimate == pytest.approx(2.0)
    assert -1 < result.lower_bound < 0


def test_one_conversation_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        paired_difference(np.array([[3.0, 2.0]]), np.array([[2.0, 2.0]]))


@pytest.mark.parametrize("texts", [2, 4, 60])
def test_the_interval_of_one_length_covers_it(texts: int):
    rng, trials = np.random.default_rng(5), 1000
    covered = 0
    for _ in range(trials):
        steps = rng.integers(10, 40, texts)
        low, high = length_interval(np.stack([rng.poisson(steps * 2.0), steps], 1)) or (0.0, 0.0)
        covered += low <= 2.0 <= high
    assert covered / trials == pytest.approx(0.95, abs=0.03)


def test_one_text_has_no_interval():
    assert length_interval(np.array([[11.0, 6.0]])) is None
