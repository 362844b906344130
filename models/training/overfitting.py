"""Whether acceptance on held-out text parts from what training sees. Pure; runs in the trainer's rank 0.

Warned of when the two latest measurements on held-out text both lie more than `FALL` (relative) below the best one, and
the training's own accepted length since the measurement before each lies above that of the best: the draft gets better
at its training text and worse at other text. Two in a row, because a measurement is of a few hundred steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from infra.files.lines import read_objects
from infra.records.data_path import HELDOUT_LENGTH

FALL = 0.03


@dataclass(frozen=True)
class LossPoint:
    """One progress line."""

    step: int
    training: float
    """Accepted length as training counts it, the bonus token included."""
    heldout: float | None
    """Acceptance length on held-out text, if measured."""


def look_of(metrics: Mapping[str, Any]) -> LossPoint:
    """The point of one line of the run's metrics."""
    training = 1.0 + sum(accumulate(metrics["acceptance_by_position"], mul))
    return LossPoint(int(metrics["step"]), training, metrics.get(HELDOUT_LENGTH))


def read_history(metrics: Path) -> list[LossPoint]:
    """All lines so far, also of a resumed run."""
    return [look_of(line) for line in read_objects(metrics)]


def overfitting_warning(history: Sequence[LossPoint]) -> str | None:
    """The warning in one sentence, or None (see above)."""
    measured = _measured(history)
    if len(measured) < 3:
        return None
    *before, last_but_one, last = measured
    best = max(before, key=lambda look: look.heldout)
    for later in (last_but_one, last):
        if later.heldout >= best.heldout * (1 - FALL) or later.training <= best.training:
            return None
    return (
        f"acceptance on held-out prompts has fallen from {best.heldout:.2f} at step {best.step} to {last.heldout:.2f} "
        f"at step {last.step}, while on the training text it rose from {best.training:.2f} to {last.training:.2f}: the "
        "draft learns its text by heart, so give more text or fewer epochs (or take the checkpoint before)"
    )


@dataclass(frozen=True)
class Measured:
    """A measurement, and the training's own mean length since the one before."""

    step: int
    training: float
    heldout: float


def _measured(history: Sequence[LossPoint]) -> list[Measured]:
    found: list[Measured] = []
    since: list[float] = []
    for look in history:
        since.append(look.training)
        if look.heldout is not None:
            found.append(Measured(look.step, sum(since) / len(since), look.heldout))
            since = []
    return found
