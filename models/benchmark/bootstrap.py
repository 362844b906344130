"""Paired bootstrap over conversations for a ratio of sums (Efron & Tibshirani 1993, ch. 13)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.refusal import Refusal

TAIL = 0.025
"""The lower bound is one-sided at 97.5 %."""
Z_BOUND, Z_POWER = 1.959964, 0.841621
"""Normal quantiles of the bound and of a power of 80 %."""
BLOCK = 4_000_000
"""Resampling weights held at once."""


@dataclass(frozen=True)
class Difference:
    """Relative difference of two acceptance lengths, challenger / champion - 1."""

    estimate: float
    lower_bound: float
    standard_error: float

    def smallest_detectable(self, margin: float) -> float:
        """The true difference whose lower bound would exceed `margin` with a power of 80 %."""
        return margin + (Z_BOUND + Z_POWER) * self.standard_error


def paired_difference(
    challenger: NDArray[np.int64], champion: NDArray[np.int64], resamples: int, seed: int
) -> Difference:
    """Resample conversations, both sides together.

    Args:
        challenger: `[N, 2]` tokens and steps of each conversation, N at least 2, with at least one step in all.
        champion: the same conversations.
        resamples: number of resamples.
        seed: the result depends on nothing else.
    """
    differences = resampled(challenger, champion, resamples, seed)
    sums = np.concatenate([challenger, champion], axis=1).astype(np.float64)
    return Difference(
        estimate=float(_relative(sums.sum(axis=0, keepdims=True))[0]),
        lower_bound=float(np.quantile(differences, TAIL)),
        standard_error=float(differences.std(ddof=1)),
    )


def length_interval(conversations: NDArray[np.int64], resamples: int, seed: int) -> tuple[float, float]:
    """95 % interval of one acceptance length, by percentiles over resampled conversations.

    Args:
        conversations: `[N, 2]` tokens and steps of each, N at least 1, with at least one step in all.
        resamples: number of resamples.
        seed: the result depends on nothing else.
    """
    number = len(conversations)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(number, np.full(number, 1 / number), size=resamples)
    tokens, steps = (weights @ conversations.astype(np.float64)).T
    # A resample without a step has nothing accepted.
    lengths = np.where(steps > 0, tokens / np.maximum(steps, 1), 1.0)
    low, high = np.quantile(lengths, [TAIL, 1 - TAIL])
    return float(low), float(high)


def resampled(
    challenger: NDArray[np.int64], champion: NDArray[np.int64], resamples: int, seed: int
) -> NDArray[np.float64]:
    """The relative difference in every resample, `[resamples]`; arguments as of `paired_difference`."""
    assert challenger.shape == champion.shape
    number = len(challenger)
    if number < 2:
        raise Refusal(f"{number} conversation cannot be resampled: benchmark.prompts needs at least 2 held-out ones")
    sums = np.concatenate([challenger, champion], axis=1).astype(np.float64)
    rng = np.random.default_rng(seed)
    parts, left = [], resamples
    while left:
        block = min(left, max(1, BLOCK // number))
        weights = rng.multinomial(number, np.full(number, 1 / number), size=block)
        parts.append(_relative(weights @ sums))
        left -= block
    return np.concatenate(parts)


def _relative(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[R, 4]` tokens, steps, tokens, steps to `[R]`; a resample without a step on either side is the worst outcome."""
    valid = (sums[:, 1] > 0) & (sums[:, 3] > 0)
    safe = np.where(valid[:, None], sums, 1.0)
    return np.where(valid, safe[:, 0] / safe[:, 1] / (safe[:, 2] / safe[:, 3]) - 1, -1.0)
