"""Saves checkpoints beside training: a copy is taken at once, written, hashed and committed in the background.

A checkpoint exists when the ledger has its row, whatever step training has reached then.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from models import checkpoint as checkpoints

SAVE_S = 1800.0
"""Timeout for writing one checkpoint, for disks that hang."""


class CheckpointSaver:
    """One save at a time, in order; the next one waits for the last, whose error it raises."""

    def __init__(self, folder: RunFolder, ledger: Ledger, incarnation: int, keep: int):
        self._folder, self._ledger, self._incarnation, self._keep = folder, ledger, incarnation, keep
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None
        self.saves = 0
        self.stall_s = 0.0
        """Seconds that training stood still for all saves: for the copies, and for saves before them."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: checkpoints.TrainerState,
        description: checkpoints.DraftDescription,
    ) -> None:
        """Begin to save the checkpoint of `step`; what is given may change once this returns."""
        started = time.monotonic()
        self.wait()
        copied = checkpoints.TrainerState(*map(on_host, (state.optimizer, state.scheduler, state.counters)))
        self._last = self._worker.submit(self._write, step, on_host(tensors), copied, description)
        self.saves += 1
        self.stall_s += time.monotonic() - started

    def wait(self) -> None:
        """Until nothing is being saved. Raises what the last save raised, TimeoutError for a disk that hangs."""
        last, self._last = self._last, None
        if last is not None:
            last.result(timeout=SAVE_S)

    def _write(
        self,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        state: checkpoints.TrainerState,
        description: checkpoints.DraftDescription,
    ) -> None:
        record = checkpoints.write_checkpoint(
            self._folder,
            self._ledger,
            incarnation=self._incarnation,
            step=step,
            tensors=tensors,
            state=state,
            description=description,
        )
        self._ledger.commit(self._incarnation, record)
        checkpoints.remove_older(self._folder, self._ledger, self._keep)


def on_host(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples with every tensor copied to the CPU."""
    # Not `.cpu().clone()`: that is two copies of what comes from a GPU.
    return checkpoints.each_tensor(lambda x: x.detach().cpu() if x.is_cuda else x.detach().clone(), value)
