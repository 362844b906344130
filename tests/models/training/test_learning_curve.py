"""What twice the data would bring: the gain of curves that are known, its band, and what is not told."""

import json
from pathlib import Path

import numpy as np
import pytest

from models.config.training import TrainingConfig
from models.training.learning_curve import LEAST_POINTS, CurvePoint, forecast, more_data

SCATTER = 0.01


def curve(
    ceiling: float,
    scale: float,
    exponent: float,
    annealing: float,
    number: int = 24,
    scatter: float = 0.0,
    seed: int = 0,
) -> list[CurvePoint]:
    """Measurements of a run with this law, under the trainer's cosine, over a million tokens."""
    time = np.arange(1, number + 1) / number
    rate = 0.1 + 0.45 * (1 + np.cos(np.pi * time))
    length = ceiling - scale * time**-exponent + annealing * (1 - rate)
    length += scatter * np.random.default_rng(seed).standard_normal(number)
    return [CurvePoint(int(1e6 * at), float(of), float(lr)) for at, of, lr in zip(time, length, rate, strict=True)]


@pytest.mark.parametrize(
    ("ceiling", "scale", "exponent", "annealing"),
    [(3.0, 0.4, 0.5, 0.2), (4.0, 1.0, 0.25, 0.0), (2.5, 0.3, 1.0, 0.1), (3.5, 0.6, 0.4, 0.3)],
)
def test_the_gain_of_a_known_curve_is_found(ceiling: float, scale: float, exponent: float, annealing: float) -> None:
    """What a falling learning rate added is not taken for the data's doing."""
    found = forecast(curve(ceiling, scale, exponent, annealing, number=60, scatter=1e-3))
    true = scale * (1 - 2**-exponent)
    assert found.lower is not None
    assert found.upper is not None
    assert found.lower <= true <= found.upper
    assert found.upper - found.lower < 0.3 * true


def test_the_band_holds_what_it_promises() -> None:
    """Over 200 noisy runs of different laws, the gain that would be measured lies in the band of 90 %."""
    random = np.random.default_rng(7)
    inside: list[bool] = []
    for seed in range(200):
        scale, exponent = random.uniform(0.2, 0.6), random.uniform(0.3, 0.9)
        points = curve(3.0, scale, exponent, random.uniform(0.0, 0.3), 40, SCATTER, seed)
        found, true = forecast(points), scale * (1 - 2**-exponent)
        measured = true + SCATTER * 2**0.5 * random.standard_normal()
        if found.lower is not None and found.upper is not None:
            inside.append(found.lower <= measured <= found.upper)
    assert len(inside) > 180
    assert 0.83 <= np.mean(inside) <= 0.98


def test_what_cannot_be_told_is_not_told() -> None:
    few, scattered = curve(3.0, 0.4, 0.5, 0.0, LEAST_POINTS - 1), curve(3.0, 0.4, 0.5, 0.0, 12, 0.3)
    falling = curve(3.0, -0.4, 0.5, 0.0, 24, SCATTER)
    assert "measurements on held-out text" in forecast(few).why
    assert "scatter too much" in forecast(scattered).why
    assert "has not risen" in forecast(falling).why
    assert "not known what it would bring: " in forecast(falling).in_words


def test_the_warm_up_is_no_part_of_the_curve() -> None:
    """Its learning rate rises, and so does acceptance, however much data there is."""
    points = curve(3.0, 0.4, 0.5, 0.2, number=40)
    warming = [CurvePoint(of, 1.0, 1e-3 * of) for of in (1, 5, 9)]
    assert forecast([*warming, *points]) == forecast(points)


def test_metrics_of_a_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"tokens": point.tokens, "learning_rate": point.rate, "heldout_acceptance_length": point.length}
        for point in curve(3.0, 0.4, 0.5, 0.2, number=40, scatter=1e-3)
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in [{"tokens": 1, "learning_rate": 1.0}, *rows]))
    found = more_data(metrics, TrainingConfig())
    assert found is not None
    assert "tokens per verification step on held-out text (90 % confidence)" in found.in_words
    for changed, why in (({"epochs": 2}, "more than once"), ({"start_from": "champion"}, "had learned before")):
        again = more_data(metrics, TrainingConfig.model_validate(changed))
        assert again is not None
        assert why in again.why
    metrics.write_text('{"tokens": 1, "learning_rate": 1.0}\n')
    assert more_data(metrics, TrainingConfig()) is None
