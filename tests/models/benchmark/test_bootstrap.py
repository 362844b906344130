import numpy as np
import pytest

from models.benchmark.bootstrap import paired_difference


def conversations(rng: np.random.Generator, number: int, lift: float) -> tuple[np.ndarray, np.ndarray]:
    """Champion and challenger of a common difficulty per conversation; ratio of expectations is (2 + lift) / 2."""
    difficulty = rng.uniform(0.5, 1.5, number)
    steps = rng.integers(10, 40, (2, number))
    champion = rng.poisson(steps[0] * 2.0 * difficulty)
    challenger = rng.poisson(steps[1] * (2.0 + lift) * difficulty)
    return np.stack([challenger, steps[1]], 1), np.stack([champion, steps[0]], 1)


def test_lower_bound_covers_the_truth_as_often_as_it_says():
    rng, truth, trials = np.random.default_rng(1), 0.15, 600
    covered = 0
    for trial in range(trials):
        challenger, champion = conversations(rng, 60, 2.0 * truth)
        covered += paired_difference(challenger, champion, 400, trial).lower_bound <= truth
    # 97.5 % nominal; four standard errors of 600 trials are 2.5 points.
    assert 0.95 <= covered / trials <= 0.995


def test_no_difference_is_rarely_called_one():
    rng = np.random.default_rng(2)
    wrong = sum(paired_difference(*conversations(rng, 60, 0.0), 400, trial).lower_bound > 0 for trial in range(600))
    assert wrong / 600 <= 0.05


def test_smallest_detectable_is_detected_four_times_of_five():
    rng = np.random.default_rng(3)
    calm = paired_difference(*conversations(rng, 2000, 0.0), 400, 0)
    scale = (2000 / 60) ** 0.5
    lift = calm.standard_error * scale * (1.959964 + 0.841621)
    found = sum(paired_difference(*conversations(rng, 60, 2 * lift), 400, t).lower_bound > 0 for t in range(300))
    assert 0.70 <= found / 300 <= 0.90
    assert calm.smallest_detectable(0.01) == pytest.approx(0.01 + calm.standard_error * 2.801585)


def test_pairing_narrows_what_unpaired_resampling_would_show():
    rng = np.random.default_rng(4)
    challenger, champion = conversations(rng, 60, 0.1)
    paired = paired_difference(challenger, champion, 2000, 0)
    shuffled = paired_difference(challenger[rng.permutation(60)], champion, 2000, 0)
    assert paired.estimate == pytest.approx(shuffled.estimate)
    assert paired.standard_error < 0.8 * shuffled.standard_error


def test_a_ratio_of_sums_not_a_mean_of_ratios():
    challenger, champion = np.array([[300, 100], [1, 1]]), np.array([[200, 100], [1, 1]])
    assert paired_difference(challenger, champion, 100, 0).estimate == pytest.approx(301 / 201 - 1)


def test_same_seed_same_bound_whatever_the_block_size(monkeypatch):
    challenger, champion = conversations(np.random.default_rng(5), 30, 0.2)
    whole = paired_difference(challenger, champion, 1000, 7)
    monkeypatch.setattr("models.benchmark.bootstrap.BLOCK", 30 * 64)
    assert paired_difference(challenger, champion, 1000, 7) == whole
    assert paired_difference(challenger, champion, 1000, 8) != whole


def test_a_resample_without_steps_counts_against_the_challenger():
    challenger = np.array([[0, 0], [30, 10]])
    result = paired_difference(challenger, np.array([[10, 10], [10, 10]]), 1000, 0)
    assert result.lower_bound == -1.0


def test_one_conversation_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        paired_difference(np.array([[3, 2]]), np.array([[2, 2]]), 100, 0)
