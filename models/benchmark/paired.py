"""Two sides on the same conversations: Student's t interval on the log ratio of their pooled ratios.

The estimate is the logarithm of the ratio of tokens / steps, pooled over conversations, and of what a step costs where
that is given. Its standard error is the jackknife's, which leaves out one conversation at a time (Efron & Tibshirani
1993, ch. 11), with n - 1 degrees of freedom. The logarithm takes away the skew of ratios, and t the optimism that
percentiles of a bootstrap have with few conversations.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from infra.refusal import Refusal

LEVEL = 0.975
"""Of the one-sided lower bound."""
Z_POWER = 0.841621
"""Normal quantile of a power of 80 %."""

Rows = NDArray[np.float64]
"""`[N, 2]` tokens and complete verification steps of each conversation."""


@dataclass(frozen=True)
class Difference:
    """Relative difference of two sides, first / second - 1."""

    log_ratio: float
    standard_error: float
    """Of `log_ratio`."""
    degrees: int
    """Of freedom."""

    @property
    def estimate(self) -> float:
        return float(np.expm1(self.log_ratio))

    @property
    def lower_bound(self) -> float:
        """One-sided, at 97.5 %."""
        return self.quantile(1 - LEVEL)

    def quantile(self, level: float) -> float:
        """The relative difference at this level of its confidence distribution."""
        return float(np.expm1(self.log_ratio + float(stdtrit(self.degrees, level)) * self.standard_error))

    def p(self, bound: float) -> float:
        """One-sided, of a true difference of at least `bound`, which is above -1."""
        error = max(self.standard_error, 1e-12)
        return float(stdtr(self.degrees, (self.log_ratio - float(np.log1p(bound))) / error))

    def smallest_detectable(self, margin: float) -> float:
        """The true difference whose lower bound would exceed `margin` with a power of 80 %."""
        return float(np.expm1(np.log1p(margin) + self._reach(LEVEL)))

    def prompts_needed(self, margin: float) -> int | None:
        """Of prompts like these, to show the estimate with a power of 80 %; None if it does not exceed `margin`."""
        excess = self.log_ratio - float(np.log1p(margin))
        return math.ceil((self.degrees + 1) * (self._reach(LEVEL) / excess) ** 2) if excess > 0 else None

    def smallest_worsening(self, tolerance: float, level: float) -> float:
        """The relative loss that would be told from one of `tolerance` at `level`, with a power of 80 %."""
        return float(-np.expm1(np.log1p(-tolerance) - self._reach(level)))

    def _reach(self, level: float) -> float:
        return (float(stdtrit(self.degrees, level)) + Z_POWER) * self.standard_error


def paired_difference(first: Rows, second: Rows, cost: float = 1.0) -> Difference:
    """Compare tokens per step; per second if `cost` is given.

    Args:
        first: `[N, 2]` tokens and steps of each conversation, N at least 2.
        second: the same conversations.
        cost: seconds of a step of the first side / of the second.

    Raises Refusal for fewer than 2 conversations.
    """
    assert first.shape == second.shape
    number = len(first)
    if number < 2:
        raise Refusal(f"{number} conversation cannot be compared: benchmark.prompts needs at least 2 held-out ones")
    whole, rest = (
        _log_lengths(one) - _log_lengths(other)
        for one, other in zip(_sums(first), _sums(second), strict=True)
    )  # fmt: skip
    error = float(np.sqrt((number - 1) / number * ((rest - rest.mean()) ** 2).sum()))
    return Difference(float(whole) - float(np.log(cost)), error, number - 1)


def length_interval(conversations: Rows) -> tuple[float, float] | None:
    """95 % interval of one acceptance length, of `[N, 2]` tokens and steps; None of fewer than 2 conversations."""
    if len(conversations) < 2:
        return None
    found = paired_difference(conversations, np.ones_like(conversations))
    return 1 + found.quantile(1 - LEVEL), 1 + found.quantile(LEVEL)


def _sums(rows: Rows) -> tuple[Rows, Rows]:
    """`[2]` sums of all conversations, and `[N, 2]` of all but one."""
    whole = rows.sum(axis=0, dtype=np.float64)
    return whole, whole - rows


def _log_lengths(sums: Rows) -> Rows:
    """Logarithms of tokens / steps, `[..., 2]` to `[...]`; without a step nothing is accepted: 1 token per step."""
    tokens, steps = sums[..., 0], sums[..., 1]
    some = (steps > 1e-9) & (tokens > 0)
    return np.log(np.where(some, tokens, 1.0) / np.where(some, steps, 1.0))
