"""The drift test: whether served acceptance has fallen below the version's benchmark.

Shiryaev-Roberts on e-values. Of a window with T tokens in V verification steps the e-value is

    exp(theta (m V - T)),   m = (1 - fall / 2) x reference

and theta is the positive root of E[exp(theta (m v - t))] = 1 over the reference's requests (t, v). So e-values
average 1 while served requests are like the reference's, *whatever the number of requests in a window*, and R = (1 +
R) x e, less the number of windows, is a martingale: the mean number of windows to a false alarm of "R >= A" is at
least A, without a simulation and without a threshold that depends on the traffic (a CUSUM has that only by
calibration at one window size). For normal windows the e-value is the likelihood ratio against a fall of that size,
and on real requests the test is as fast as a CUSUM of the same false alarms to a tenth (benchmarks/drift.py).

Two things keep the promise where the assumptions end. The benchmark knows its figure to a standard error only, so the
reference is its lower 97.5 % bound. And traffic varies more than requests do by themselves, so theta is divided by
the dispersion seen in earlier windows, those of the version before included (the first ones ever are only learned from:
their e-value is 1); a smaller theta can only make false alarms rarer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray

from infra.records.data_path import Record
from infra.refusal import Refusal

Z_BOUND = 1.959964
"""Normal quantile of the reference's one-sided 97.5 % lower bound."""
LEAST_VARIANCE = 1e-9
"""Smallest variance of a window's tokens per verification step; below it is rounding."""
LEAST_REQUESTS = 20
LEARNED_WINDOWS = 20
"""The first windows show how much the traffic varies, and are not tested."""


@dataclass(frozen=True)
class Reference:
    """Acceptance of a version in its benchmark: `[N, 2]` tokens and verification steps of each conversation.

    Expected steps vary less than counted ones; served windows show the difference, as dispersion.

    Raises Refusal for one that no fall can be told from.
    """

    requests: NDArray[np.float64]

    def __post_init__(self) -> None:
        if len(self.requests) < LEAST_REQUESTS:
            raise Refusal(
                f"the benchmark has {len(self.requests)} conversations, a drift test needs at least {LEAST_REQUESTS}: "
                "raise benchmark.prompts and retrain"
            )
        if self.requests[:, 1].sum() <= 0:
            raise Refusal("the benchmark has no verification step: raise benchmark.max_new_tokens and retrain")

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float]]) -> "Reference":
        return cls(np.array(rows, dtype=np.float64).reshape(-1, 2))

    @cached_property
    def length(self) -> float:
        """Acceptance length: a ratio of sums."""
        tokens, steps = self.requests.sum(axis=0)
        return float(tokens / steps)

    @cached_property
    def variance_per_step(self) -> float:
        """Variance of a window's tokens around its mean, per verification step of the window."""
        residuals = self.requests[:, 0] - self.length * self.requests[:, 1]
        return float((residuals**2).sum() / self.requests[:, 1].sum())

    @cached_property
    def lower_bound(self) -> float:
        """One-sided 97.5 % bound of the length, conversations being the sampling unit."""
        number = len(self.requests)
        error = sqrt(self.variance_per_step / self.requests[:, 1].sum() * number / (number - 1))
        return self.length - Z_BOUND * error


class Statistic(Record):
    """The test after some windows: all that it remembers of them."""

    log_value: float | None = None
    """log R; None before the first window (R = 0)."""
    windows: int = 0
    """Learned from, in all."""
    squares: float = 0.0
    """Sum of halved squared differences of successive standardised windows."""
    differences: int = 0
    """How many."""
    last: float | None = None
    """The last standardised window; None before the first one of this version."""

    @property
    def dispersion(self) -> float:
        """How many times as much windows vary as their requests explain; at least 1.

        Successive differences, so that a fall does not pass for dispersion.
        """
        return max(1.0, self.squares / self.differences) if self.differences else 1.0

    @property
    def learning(self) -> bool:
        """Whether the next window is only learned from."""
        return self.windows < LEARNED_WINDOWS

    def anew(self) -> "Statistic":
        """The test begins again, as after an alarm; what was learned of the traffic stays."""
        return self.model_copy(update={"log_value": None})

    def of_next_version(self) -> "Statistic":
        """Another version serves the same traffic: what was learned of it stays."""
        return self.model_copy(update={"log_value": None, "last": None})


@dataclass(frozen=True)
class DriftTest:
    """The sequential test against one reference.

    Args:
        reference: the version's benchmark.
        fall: relative fall of the acceptance length that it is made for.
        arl: mean number of windows to a false alarm, at least.

    Raises Refusal for a reference too rough for that fall.
    """

    reference: Reference
    fall: float
    arl: float

    def __post_init__(self) -> None:
        length, bound = self.reference.length, self.reference.lower_bound
        if self.middle >= length or bound <= (1 - self.fall / 2) * length:
            need = int(len(self.reference.requests) * ((length - bound) / (self.fall / 2 * length)) ** 2) + 1
            raise Refusal(
                f"the benchmark knows its acceptance length only to {1 - bound / length:.1%} (lower 97.5% bound "
                f"{bound:.3f} of {length:.3f}), too rough for a fall of {self.fall:.0%}: set benchmark.prompts to "
                f"more than {need} and retrain"
            )

    @property
    def middle(self) -> float:
        """The acceptance length below which windows speak for a fall."""
        return (1 - self.fall / 2) * self.reference.lower_bound

    @cached_property
    def theta(self) -> float:
        """The positive root of E[exp(theta X)] = 1 at the edge of "no fall", found by bisection.

        X has a negative mean, so the expectation first falls below 1 and then grows without bound. Where no
        conversation of the benchmark has a positive X there is no root; a normal law of the same mean and variance
        gives one.
        """
        tokens, steps = self.reference.requests.T
        excess = (self.reference.length - self.reference.lower_bound) * steps
        x = self.middle * steps - (tokens - excess)
        if self.reference.variance_per_step < LEAST_VARIANCE:
            raise Refusal(
                "every conversation of the benchmark has the same acceptance length, so nothing says how much served "
                "ones vary: give the benchmark longer and more prompts"
            )
        if x.max() <= 0:
            return float(-2 * x.mean() / x.var())
        low, high = 0.0, 1.0 / float(x.max())
        while np.exp(high * x).mean() < 1:
            low, high = high, 2 * high
        while high - low > 1e-12 * high:
            half = (low + high) / 2
            low, high = (low, half) if np.exp(half * x).mean() >= 1 else (half, high)
        return low

    def after(self, before: Statistic, tokens: float, steps: float) -> Statistic:
        """The statistic after one more window."""
        assert steps > 0
        expected = sqrt(self.reference.variance_per_step * steps)
        standardised = (tokens - self.reference.length * steps) / expected
        step = None if before.last is None else (standardised - before.last) ** 2 / 2
        evidence = 0.0 if before.learning else self.theta / before.dispersion * (self.middle * steps - tokens)
        carried = -inf if before.log_value is None else before.log_value
        return Statistic(
            log_value=float(np.logaddexp(0.0, carried)) + evidence,
            windows=before.windows + 1,
            squares=before.squares + (step or 0.0),
            differences=before.differences + (step is not None),
            last=standardised,
        )

    def alarms(self, statistic: Statistic) -> bool:
        """Whether it says that acceptance has fallen."""
        return statistic.log_value is not None and statistic.log_value >= log(self.arl)

    def share(self, statistic: Statistic) -> float:
        """Progress of the statistic towards its threshold, for people: log(1 + R) / log(1 + A)."""
        value = 0.0 if statistic.log_value is None else exp(min(statistic.log_value, 700.0))
        return float(np.log1p(value) / np.log1p(self.arl))
