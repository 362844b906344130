"""Acceptance on held-out text while a draft trains: the simulated walk over stored states, and its warning.

The averaged weights walk, which are those of the export. Nothing that training depends on is touched: the walk draws
nothing at random, takes no gradients, and the weights are back in place when it ends. Other ranks go on to the next
step, and wait there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infra.files.lines import read_objects
from infra.records.data_path import HELDOUT_LENGTH, HELDOUT_SEEN
from models.capture.engine import Continued
from models.capture.heldout import read_heldout
from models.decoding.acceptance import AcceptedCounts, acceptance_length
from models.decoding.simulated import simulate
from models.drafts.base import Draft
from models.drafts.batched_proposer import shown_in
from models.run import PreparedRun

FALL = 0.03
"""Relative fall of the held-out length that is warned of."""


class HeldoutWalk:
    """Measures every `training.heldout_steps` steps, as soon as a generator has made the texts."""

    def __init__(self, run: PreparedRun, draft: Draft, divided: bool):
        """`divided`: the draft is going to be divided among ranks, so it is copied now. The copy's weights stay on the
        host, and its tables are the draft's own; a measurement puts the averaged weights on the device."""
        self._path, self._every = run.folder.heldout, run.config.training.heldout_steps
        self._lookahead, self._media_ids = run.config.benchmark.lookahead, torch.tensor(run.target.media_ids)
        self._texts, self._eos_ids = list[Continued](), frozenset(run.target.eos_ids)
        tables = {id(buffer): buffer for buffer in draft.buffers()}
        self._trained, self._draft = draft, deepcopy(draft, tables) if divided and self._every else draft

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def measure(self, averaged: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
        """Acceptance length of the averaged weights at `benchmark.lookahead` by `HELDOUT_LENGTH`, and after images by
        `HELDOUT_SEEN`; nothing where there are no texts yet, or they end at once."""
        if not self._texts:
            self._texts = read_heldout(self._path) or []
        draft = self._draft
        for name, table in self._trained.named_buffers():
            _put(draft, name, table)
        counts: dict[str, list[AcceptedCounts]] = {HELDOUT_LENGTH: [], HELDOUT_SEEN: []}
        with weights_of(draft, averaged, device):
            for text in self._texts:
                source = draft
                if text.embedded is not None:
                    shown = shown_in(text.prompt, text.continuation, self._media_ids)
                    assert text.places is not None
                    source = draft.after_images(*(x.to(device) for x in (text.embedded, text.places, shown)))
                aux, eos_ids = text.aux.to(device), self._eos_ids
                found = simulate(source, text.prompt, text.continuation, aux, self._lookahead, eos_ids=eos_ids)
                counts[HELDOUT_SEEN if text.shown else HELDOUT_LENGTH].append(found[-1])
        return {name: acceptance_length(some) for name, some in counts.items() if any(one.steps for one in some)}


@contextmanager
def weights_of(draft: Draft, weights: Mapping[str, Tensor], device: torch.device) -> Iterator[None]:
    """Use these weights temporarily, on `device`; the draft's own ones stay as and where they are."""
    own = dict(draft.named_parameters())
    try:
        for name in own:
            _put(draft, name, nn.Parameter(weights[name].to(device), requires_grad=False))
        yield
    finally:
        for name, parameter in own.items():
            _put(draft, name, parameter)


def _put(draft: nn.Module, name: str, tensor: Tensor) -> None:
    """A parameter or buffer in place of the one of this name."""
    owner, _, own = name.rpartition(".")
    setattr(draft.get_submodule(owner), own, tensor)


class LossPoint(NamedTuple):
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
    """The draft gets better at its training text and worse at other text: the warning in one sentence, or None.

    It warns when the two latest held-out lengths both lie more than `FALL` below the best one, and training's mean
    length since the measurement before each lies above that of the best. Two in a row, because a measurement is of a
    few hundred steps.
    """
    measured: list[tuple[int, float, float]] = []
    since: list[float] = []
    for step, training, heldout in history:
        since.append(training)
        if heldout is not None:
            measured.append((step, sum(since) / len(since), heldout))
            since = []
    if len(measured) < 3:
        return None
    *before, last_but_one, last = measured
    best_step, best_training, best_heldout = max(before, key=lambda point: point[2])
    for _, training, heldout in (last_but_one, last):
        if heldout >= best_heldout * (1 - FALL) or training <= best_training:
            return None
    step, training, heldout = last
    return (
        f"acceptance on held-out prompts has fallen from {best_heldout:.2f} at step {best_step} to {heldout:.2f} at "
        f"step {step}, while on the training text it rose from {best_training:.2f} to {training:.2f}: the draft learns "
        "its text by heart, so give more text or fewer epochs (or take the checkpoint before)"
    )
