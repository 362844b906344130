"""A rank that finds a sample's hidden states gone or damaged has them captured again, and waits."""

import threading
import time
from collections.abc import Callable

from infra.ledger.ledger import Ledger
from infra.ledger.recapture import RecaptureError, lose, take_again
from infra.records.data_path import ObjectRecord, PlannedSample
from infra.transport.base import StoreUnavailableError, TransferError, Transport
from models.run import PreparedRun

TIMES = 3
"""Objects of a sample that may be lost one after the other. Beyond that something else is wrong: the trainer ends."""
POLL_S = 0.1


class Recapture:
    """A part of the store that dies costs its objects, not the trainer.

    Where it is not possible the trainer ends and its successor has them captured (`infra.ledger.trainers.resume_run`):
    generators that have no turn now, samples in any order, and stored hidden states, which are written once.
    """

    def __init__(
        self, run: PreparedRun, transport: Transport, ledger: Ledger, incarnation: int, stop: threading.Event
    ) -> None:
        self._transport, self._ledger, self._incarnation, self._stop = transport, ledger, incarnation, stop
        self._stall_s = run.config.stall_s
        self._possible = (
            run.config.training.order == "strict"
            and run.sharing.mode != "alternate"
            and run.config.transport.kind != "stored"
        )
        self._replaced: list[str] = []

    def read(self, planned: PlannedSample, step: int, read: Callable[[ObjectRecord], None]) -> None:
        """Call `read` with the sample's object, and again with another one as long as that is gone or damaged.

        Raises TransferError, RecaptureError.
        """
        record = planned.object
        for left in reversed(range(TIMES + 1)):
            try:
                read(record)
            except StoreUnavailableError:
                raise
            except TransferError as error:
                if not self._possible or not left:
                    raise
                lost = lose(self._ledger, self._incarnation, record.key, lambda: set(self._transport.keys()))
                others = f", and {lost - 1} others" if lost > 1 else ""
                print(f"sample {planned.sample} is captured again{others}: {error}", flush=True)
                record = self._captured_again(planned, step, record.key)
            else:
                return

    def _captured_again(self, planned: PlannedSample, step: int, gone: str) -> ObjectRecord:
        deadline = time.monotonic() + self._stall_s
        while (record := take_again(self._ledger, self._incarnation, planned, step, gone)) is None:
            if self._stop.wait(POLL_S):
                raise RecaptureError(f"sample {planned.sample} is not waited for: the training has ended")
            if time.monotonic() > deadline:
                raise RecaptureError(f"sample {planned.sample} was not captured again within {self._stall_s:g} s")
        self._replaced.append(record.key)
        return record

    def delete(self) -> None:
        """Delete the objects that were captured again, once all ranks have read them."""
        while self._replaced:
            self._transport.delete(self._replaced.pop())
