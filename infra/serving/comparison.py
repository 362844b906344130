"""Whether one source of acceptance is worse than another, by ratios of sums over groups of verification steps.

A group is a stretch of traffic, or one prompt. Steps of one request resemble each other, so groups are the units of the
variance, which is that of a ratio estimator (linearisation), and the bound is Student's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from infra.records.data_path import Record

MIN_GROUPS = 5
"""With fewer, a variance says too little."""
LEVEL, EARLY_LEVEL = 0.025, 0.0005
"""One-sided; the stricter one for a look that is repeated again and again."""


class StepGroup(Record):
    """Verification steps, and the tokens they emitted."""

    tokens: int
    steps: int


@dataclass(frozen=True)
class LengthRatio:
    """Acceptance length of the new version, relative to the old one's."""

    new: float
    old: float
    error: float
    """Standard error of the logarithm of the ratio."""
    freedom: int

    @property
    def ratio(self) -> float:
        """New / old."""
        return self.new / self.old

    def upper(self, level: float) -> float:
        """One-sided upper bound of the ratio."""
        return self.ratio * math.exp(-float(stdtrit(self.freedom, level)) * self.error)

    def is_worse(self, max_loss: float, level: float = LEVEL) -> bool:
        """Whether the new version lost more than `max_loss`, and chance does not explain that it lost."""
        return self.ratio < 1 - max_loss and self.upper(level) < 1

    @property
    def words(self) -> str:
        """For people."""
        return f"acceptance length {self.new:.2f} against {self.old:.2f} ({self.ratio - 1:+.1%})"


def compare_paired(new: Sequence[StepGroup], old: Sequence[StepGroup]) -> LengthRatio | None:
    """Groups of the same prompts in the same order; None with too few of them, or without steps."""
    both = [(ours, theirs) for ours, theirs in zip(new, old, strict=True) if ours.steps and theirs.steps]
    if len(both) < MIN_GROUPS:
        return None
    ours, theirs = ([pair[side] for pair in both] for side in (0, 1))
    differences = [a - b for a, b in zip(_influences(ours), _influences(theirs), strict=True)]
    return LengthRatio(_length(ours), _length(theirs), _error(differences), len(both) - 1)


def compare_apart(new: Sequence[StepGroup], old: Sequence[StepGroup]) -> LengthRatio | None:
    """Groups that have nothing to do with each other; None with too few on either side."""
    ours, theirs = ([group for group in side if group.steps] for side in (new, old))
    if min(len(ours), len(theirs)) < MIN_GROUPS:
        return None
    error = math.hypot(_error(_influences(ours)), _error(_influences(theirs)))
    return LengthRatio(_length(ours), _length(theirs), error, min(len(ours), len(theirs)) - 1)


def _length(groups: Sequence[StepGroup]) -> float:
    return sum(group.tokens for group in groups) / sum(group.steps for group in groups)


def _influences(groups: Sequence[StepGroup]) -> list[float]:
    """By how much each group moves the logarithm of the length; they add to zero."""
    length, tokens = _length(groups), sum(group.tokens for group in groups)
    return [(group.tokens - length * group.steps) / tokens for group in groups]


def _error(influences: Sequence[float]) -> float:
    count = len(influences)
    return math.sqrt(count / (count - 1) * sum(one * one for one in influences))
