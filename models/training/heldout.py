"""Acceptance on held-out text while a draft trains: the simulated walk over stored states. Runs in rank 0.

The averaged weights walk, which are those of the export. Nothing that training goes on from is touched: the walk draws
nothing at random, takes no gradients, and the weights are back in place when it ends. Other ranks go on to the next
step, and wait there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from models.benchmark.acceptance import acceptance_length
from models.capture.engine import Continued
from models.capture.heldout import read_heldout
from models.decoding.simulated import simulate
from models.run import Run
from models.training.lightning_module import DraftModule


class HeldoutWalk:
    """Measures every `training.heldout_steps` steps, as soon as a generator has made the texts."""

    def __init__(self, run: Run):
        self._path, self._every = run.folder.heldout, run.config.training.heldout_steps
        self._lookahead = run.config.benchmark.lookahead
        self._texts: list[Continued] = []

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def measure(self, module: DraftModule) -> float | None:
        """Acceptance length of the averaged weights at `benchmark.lookahead`; None where there are no texts yet, or
        they end at once."""
        if not self._texts and self._path.is_file():
            self._texts = read_heldout(self._path)
        draft, device = module.draft, next(module.draft.parameters()).device
        counts = []
        with averaged_weights(module):
            for text in self._texts:
                aux = text.aux.to(device)
                counts.append(simulate(draft, text.prompt, text.continuation, aux, self._lookahead)[-1])
        return acceptance_length(counts) if any(count.steps for count in counts) else None


@contextmanager
def averaged_weights(module: DraftModule) -> Iterator[None]:
    """The draft has its averaged weights meanwhile; its own ones stay where they are in memory."""
    own = {name: parameter.data for name, parameter in module.draft.named_parameters()}
    try:
        for name, parameter in module.draft.named_parameters():
            parameter.data = module.averaged[name].to(parameter.device)
        yield
    finally:
        for name, parameter in module.draft.named_parameters():
            parameter.data = own[name]
