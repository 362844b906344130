"""Bootstrap over conversations of one ratio of sums (Efron & Tibshirani 1993, ch. 13)."""

import numpy as np
from numpy.typing import NDArray

TAIL = 0.025
"""Of a 95 % interval, on each side."""


def length_interval(conversations: NDArray[np.float64], resamples: int, seed: int) -> tuple[float, float]:
    """95 % interval of one acceptance length, by percentiles over resampled conversations.

    Args:
        conversations: `[N, 2]` tokens and steps of each, or their expectations; N at least 1, with at least one step
            in all.
        resamples: number of resamples.
        seed: the result depends on nothing else.
    """
    number = len(conversations)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(number, np.full(number, 1 / number), size=resamples)
    tokens, steps = (weights @ conversations).T
    # A resample without a step has nothing accepted.
    lengths = np.where(steps > 0, tokens / np.maximum(steps, 1), 1.0)
    low, high = np.quantile(lengths, [TAIL, 1 - TAIL])
    return float(low), float(high)
