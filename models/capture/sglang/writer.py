"""The thread that writes captured texts to the transport while the engine goes on with its next batch."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from infra.files.run_folder import RunFolder
from infra.records.data_path import CaptureReply, CaptureSpec
from infra.refusal import Refusal
from infra.transport.base import Transport
from infra.transport.choice import open_transport
from models.capture.sglang.assembly import Assembly
from models.capture.sglang.host_copies import HostCopies, HostCopy
from models.capture.sglang.outbox import PendingReply
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout, SampleError, check_finite


@dataclass(frozen=True)
class RequestRows:
    """One request's rows of a prefill."""

    request: str
    """Its id."""
    key: str
    total: int | None
    """Tokens of its prompt; None where its answer is captured too: see `FinishedAnswer`."""
    start: int
    """Position of its first row in the text."""
    rows: slice
    reply: PendingReply | None
    """None before the last piece: the engine does not reply yet."""


@dataclass(frozen=True)
class CapturedPrefill:
    """What a prefill computed for captured requests."""

    parts: tuple[RequestRows, ...]
    copy: HostCopy | Exception
    """Or why there is none: every part fails."""
    ended: tuple[str, ...]
    """Requests that ended before they were complete."""


@dataclass(frozen=True)
class CapturedStep:
    """What a step of decoding computed."""

    rows: Mapping[str, int]
    """The row of each captured request."""
    copy: HostCopy | Exception


@dataclass(frozen=True)
class FinishedAnswer:
    """A request that was captured with its answer, at its end."""

    request: str
    key: str
    total: int
    """Tokens that were read: its prompt and its answer, without the last token."""
    reply: PendingReply


Work = CapturedPrefill | CapturedStep | FinishedAnswer


class Writer:
    """Writes batches in their order. An error fails the reply of its request alone.

    If the thread itself fails nevertheless, the whole server ends (`ends_server`), because requests would wait for
    ever. A server that has users goes on.
    """

    def __init__(self, spec: CaptureSpec, layout: HiddenStateLayout, copies: HostCopies, ends_server: bool = True):
        self._spec, self._layout, self._copies, self._ends_server = spec, layout, copies, ends_server
        self._transport: Transport | None = None
        self.assembly = Assembly()
        self._batches: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._run, name="capture writer", daemon=True).start()

    def put(self, batch: Work) -> None:
        """Write this batch after the earlier ones. The ring of copies bounds how many wait."""
        self._batches.put(batch)

    def close(self) -> None:
        """End after what was put."""
        self._batches.put(None)

    def _run(self) -> None:
        failed = True
        try:
            while (batch := self._batches.get()) is not None:
                self.write(batch)
            failed = False
        finally:
            if self._transport is not None:
                self._transport.close()
            if failed:
                # First the reason: the server's processes may be gone before the thread would print it.
                traceback.print_exc()
            if failed and self._ends_server:
                # What SGLang's own processes do: the server's main process then ends them all.
                os.kill(os.getppid(), signal.SIGQUIT)

    def write(self, batch: Work) -> None:
        """Write the texts that this batch completed, and give their replies."""
        if isinstance(batch, FinishedAnswer):
            batch.reply.give(self._reply(batch, lambda: self.assembly.take(batch.request, batch.total)))
            return
        if isinstance(batch.copy, HostCopy):
            batch.copy.wait()
        if isinstance(batch, CapturedStep):
            self._keep(batch)
        else:
            self.assembly.drop(batch.ended)
            for part in batch.parts:
                reply = self._reply(part, partial(self._add, part, batch.copy))
                if part.reply is not None:
                    part.reply.give(reply)
        if isinstance(batch.copy, HostCopy):
            self._copies.release(batch.copy)

    def _keep(self, step: CapturedStep) -> None:
        """Keep a step's rows: few, but there are many steps, so little is done for each."""
        if isinstance(step.copy, Exception):
            for request in step.rows:
                self.assembly.fail(request, step.copy)
            return
        self.assembly.append(step.rows, step.copy.kept())
        for request, row in {} if step.copy.finite.all() else step.rows.items():
            try:
                check_finite(step.copy.finite[:, row : row + 1])
            except SampleError as error:
                self.assembly.fail(request, error)

    def _add(self, part: RequestRows, copy: HostCopy | Exception) -> HiddenStates | None:
        if isinstance(copy, Exception):
            raise copy
        check_finite(copy.finite[:, part.rows])
        return self.assembly.add(part.request, part.total, part.start, copy.hidden.rows(part.rows))

    def _reply(self, part: RequestRows | FinishedAnswer, rows: Callable[[], HiddenStates | None]) -> CaptureReply:
        """Write the rows of a text that is whole. The reply says what became of it."""
        try:
            whole = rows()
            return CaptureReply() if whole is None else self._put(part.key, whole)
        except Exception as error:  # noqa: BLE001 (the reply carries it; other requests are not affected)
            if part.reply is None:
                self.assembly.fail(part.request, error)
            else:
                self.assembly.drop([part.request])
            return failure(error)

    def _put(self, key: str, whole: HiddenStates) -> CaptureReply:
        self._layout.check_shapes(whole, len(whole.last))
        # Opened here, because the engine should not wait for it.
        if self._transport is None:
            run, serves_users = RunFolder(self._spec.run), not self._ends_server
            self._transport = open_transport(self._spec.transport, run, joins=serves_users)
        begun = time.perf_counter()
        record = self._transport.put(key, self._layout.pack(whole))
        return CaptureReply(record=record, put_s=time.perf_counter() - begun)


def failure(error: Exception) -> CaptureReply:
    """The reply for an error: only a SampleError is the sample's fault."""
    if isinstance(error, SampleError):
        return CaptureReply(error=str(error), fault="sample")
    if isinstance(error, Refusal):
        return CaptureReply(error=str(error), fault="setting")
    return CaptureReply(error=f"{type(error).__name__}: {error}", fault="engine")
