"""Acceptance on held-out text while a draft trains: the simulated walk over stored states.

The averaged weights walk, which are those of the export. Nothing that training depends on is touched: the walk draws
nothing at random, takes no gradients, and the weights are back in place when it ends. Other ranks go on to the next
step, and wait there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from models.capture.engine import Continued
from models.capture.heldout import read_heldout
from models.decoding.acceptance import acceptance_length
from models.decoding.simulated import simulate
from models.drafts.base import Draft
from models.run import PreparedRun


class HeldoutWalk:
    """Measures every `training.heldout_steps` steps, as soon as a generator has made the texts."""

    def __init__(self, run: PreparedRun, draft: Draft, divided: bool):
        """A draft that is going to be divided among ranks is copied now, but for its tables, which stay whole."""
        self._path, self._every = run.folder.heldout, run.config.training.heldout_steps
        self._lookahead = run.config.benchmark.lookahead
        self._texts: list[Continued] = []
        tables = {id(buffer): buffer for buffer in draft.buffers()}
        self._draft = deepcopy(draft, tables) if divided and self._every else draft

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def measure(self, averaged: Mapping[str, Tensor], device: torch.device) -> float | None:
        """Acceptance length of the averaged weights at `benchmark.lookahead`; None where there are no texts yet, or
        they end at once."""
        if not self._texts:
            self._texts = read_heldout(self._path) or []
        draft = self._draft.to(device)
        counts = []
        with weights_of(draft, averaged):
            for text in self._texts:
                aux = text.aux.to(device)
                counts.append(simulate(draft, text.prompt, text.continuation, aux, self._lookahead)[-1])
        return acceptance_length(counts) if any(count.steps for count in counts) else None


@contextmanager
def weights_of(draft: Draft, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Use these weights temporarily; the draft's own ones stay in memory."""
    own = {name: parameter.data for name, parameter in draft.named_parameters()}
    try:
        for name, parameter in draft.named_parameters():
            parameter.data = weights[name].to(parameter.device)
        yield
    finally:
        for name, parameter in draft.named_parameters():
            parameter.data = own[name]
