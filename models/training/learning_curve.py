"""What more data would bring: a saturating curve through a run's acceptance on held-out text.

`length(t) = A - b * t^-c + g * (1 - r(t))` over the tokens `t` that a draft has trained on. The first two terms are the
power law that losses and acceptance of drafts follow; the last one is what a falling learning rate adds (`r`: its share
of the peak), which a longer run gets at its own end, not before. Given `c` the curve is linear, so its posterior under
flat priors is exact on a grid of `c`; draws in which acceptance falls with data, or with a falling rate, are left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infra.files.lines import read_objects
from infra.quantities import plural
from infra.records.data_path import HELDOUT_LENGTH, MoreData
from models.config.training import TrainingConfig

EXPONENTS = np.geomspace(0.05, 2.0, 256)
DRAWS, SEED = 4000, 20261125
LEAST_POINTS, LEAST_SPAN = 6, 4.0
BAND = 5.0, 95.0
"""Percentiles."""
WIDEST = 0.1
"""Band that still says something, as a share of the present length."""


class CurvePoint(NamedTuple):
    """One measurement on held-out text."""

    tokens: int
    """Trained on so far."""
    length: float
    """Acceptance length."""
    rate: float
    """Learning rate."""


def measured_points(metrics: Path) -> list[CurvePoint]:
    """Those of a run's metrics."""
    return [
        CurvePoint(int(row["tokens"]), row[HELDOUT_LENGTH], row["learning_rate"])
        for row in read_objects(metrics)
        if HELDOUT_LENGTH in row
    ]


def more_data(metrics: Path, training: TrainingConfig) -> MoreData | None:
    """The forecast for a finished run with these metrics; None where held-out text was not measured."""
    points = measured_points(metrics)
    if not points:
        return None
    if training.epochs > 1:
        return MoreData(why="the run passed over its text more than once, which new text does not do")
    if training.start_from is not None:
        return MoreData(why="training began with a draft that had learned before")
    return forecast(points)


def forecast(points: Sequence[CurvePoint], widest: float = WIDEST) -> MoreData:
    """The gain that twice the data would bring at the end of a run like this one, with a band of 90 %.

    The band holds what would be measured on the same prompts: this run's scatter counts at both ends. Where it is wider
    than `widest` as a share of the present length, nothing is told.
    """
    peak = max(range(len(points)), key=lambda place: points[place].rate, default=0)
    used = points[peak:]  # the warm-up is no part of the curve
    if len(used) < LEAST_POINTS or used[-1].tokens < LEAST_SPAN * used[0].tokens:
        return MoreData(why=f"only {plural(len(used), 'measurement')} on held-out text after the warm-up")
    gains = _gains(used, np.random.default_rng(SEED))
    if gains is None:
        return MoreData(why="acceptance on held-out text has not risen steadily")
    lower, upper = np.percentile(gains, BAND)
    if upper - lower > widest * used[-1].length:
        return MoreData(why=f"the measurements scatter too much: {lower:+.2f} to {upper:+.2f}")
    return MoreData(lower=float(lower), upper=float(upper))


def _gains(points: Sequence[CurvePoint], random: np.random.Generator) -> np.ndarray | None:
    """`[DRAWS]`: gains of twice the data by draws from the posterior; None where hardly any rises with data."""
    tokens, length, rate = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    time, annealed = tokens / tokens[-1], 1 - rate / rate.max()
    fits = [_fit(time, length, annealed, exponent) for exponent in EXPONENTS]
    weights = np.array([fit.log_weight for fit in fits])
    weights = np.exp(weights - weights.max())
    rising: list[np.ndarray] = []
    drawn = random.multinomial(16 * DRAWS, weights / weights.sum())
    for exponent, fit, number in zip(EXPONENTS, fits, drawn, strict=True):
        variance = fit.residual / random.chisquare(fit.freedom, number)
        noise = random.standard_normal((number, len(fit.best))) @ fit.spread.T
        coefficients = fit.best + np.sqrt(variance)[:, None] * noise
        kept = (coefficients[:, 1:] >= 0).all(axis=1)
        scatter = np.sqrt(2 * variance[kept]) * random.standard_normal(int(kept.sum()))
        rising.append(coefficients[kept, 1] * (1 - 2.0**-exponent) + scatter)
    gains = np.concatenate(rising)
    return gains if len(gains) >= DRAWS // 4 else None


class _Fit(NamedTuple):
    """Least squares at one exponent."""

    log_weight: float
    """Of the exponent's posterior."""
    best: np.ndarray
    """`[p]`: A, b, and g where the learning rate falls."""
    spread: np.ndarray
    """`[p, p]`: factor of the coefficients' covariance for a residual variance of 1."""
    residual: float
    """Sum of squares."""
    freedom: int


def _fit(time: np.ndarray, length: np.ndarray, annealed: np.ndarray, exponent: float) -> _Fit:
    columns = [np.ones_like(time), -(time**-exponent)]
    if annealed.max() > 0:
        columns.append(annealed)
    design = np.stack(columns, axis=1)
    orthogonal, triangle = np.linalg.qr(design)
    spread = np.linalg.inv(triangle)
    best = spread @ orthogonal.T @ length
    freedom = len(time) - len(columns)
    residual = float(((length - design @ best) ** 2).sum()) + 1e-12
    log_weight = float(np.linalg.slogdet(spread)[1]) - freedom / 2 * float(np.log(residual))
    return _Fit(log_weight, best, spread, residual, freedom)
