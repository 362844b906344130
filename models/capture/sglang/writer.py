"""The thread that writes captured prompts to the transport while the engine goes on with its next prefill."""

import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from queue import SimpleQueue

from infra.files.run_folder import RunFolder
from infra.records.data_path import CaptureReply, CaptureSpec
from infra.refusal import Refusal
from infra.transport.base import Transport
from infra.transport.choice import open_transport
from models.capture.sglang.assembly import Assembly
from models.capture.sglang.host_copies import HostCopies, HostCopy
from models.capture.sglang.outbox import PendingReply
from models.targets.layout import HiddenStateLayout, SampleError, check_finite


@dataclass(frozen=True)
class PromptRows:
    """One request's rows of a prefill."""

    request: str
    """Its id."""
    key: str
    total: int
    """Tokens of its prompt."""
    start: int
    """Position of its first row in the prompt."""
    rows: slice
    reply: PendingReply | None
    """None before the last chunk of a prompt: the engine does not reply yet."""


@dataclass(frozen=True)
class CapturedPrefill:
    """What one prefill computed for captured requests."""

    parts: tuple[PromptRows, ...]
    copy: HostCopy | Exception
    """Or why there is none: every part fails."""
    ended: tuple[str, ...]
    """Requests that ended before their last chunk."""


class Writer:
    """Writes prefills in their order. An error fails the reply of its request alone.

    The thread itself runs as long as the process: if it fails nevertheless, the whole server ends, because requests
    would wait for ever.
    """

    def __init__(self, spec: CaptureSpec, layout: HiddenStateLayout, copies: HostCopies):
        self._spec, self._layout, self._copies = spec, layout, copies
        self._transport: Transport | None = None
        self.assembly = Assembly()
        self._prefills: SimpleQueue[CapturedPrefill] = SimpleQueue()
        threading.Thread(target=self._run, name="capture writer", daemon=True).start()

    def put(self, prefill: CapturedPrefill) -> None:
        """Write this prefill after the earlier ones. The ring of copies bounds how many wait."""
        self._prefills.put(prefill)

    def _run(self) -> None:
        try:
            while True:
                self.write(self._prefills.get())
        finally:
            # First the reason: the server's processes may be gone before the thread would print it.
            traceback.print_exc()
            # What SGLang's own processes do: the server's main process then ends them all.
            os.kill(os.getppid(), signal.SIGQUIT)

    def write(self, prefill: CapturedPrefill) -> None:
        """Write the prompts that this prefill completed, and give their replies."""
        self.assembly.drop(prefill.ended)
        if isinstance(prefill.copy, HostCopy):
            prefill.copy.wait()
        for part in prefill.parts:
            reply = self._write(part, prefill.copy)
            if part.reply is not None:
                part.reply.give(reply)
        if isinstance(prefill.copy, HostCopy):
            self._copies.release(prefill.copy)

    def _write(self, part: PromptRows, copy: HostCopy | Exception) -> CaptureReply:
        try:
            if isinstance(copy, Exception):
                raise copy
            check_finite(copy.finite[:, part.rows])
            whole = self.assembly.add(part.request, part.total, part.start, copy.hidden.rows(part.rows))
            if whole is None:
                return CaptureReply()
            self._layout.check_shapes(whole, part.total)
            # Opened here, because the engine should not wait for it.
            self._transport = self._transport or open_transport(self._spec.transport, RunFolder(self._spec.run))
            begun = time.perf_counter()
            record = self._transport.put(part.key, self._layout.pack(whole))
            return CaptureReply(record=record, put_s=time.perf_counter() - begun)
        except Exception as error:  # noqa: BLE001 (the reply carries it; other requests are not affected)
            if part.reply is None:
                self.assembly.fail(part.request, error)
            else:
                self.assembly.drop([part.request])
            return failure(error)


def failure(error: Exception) -> CaptureReply:
    """The reply for an error: only a SampleError is the sample's fault."""
    if isinstance(error, SampleError):
        return CaptureReply(error=str(error), fault="sample")
    if isinstance(error, Refusal):
        return CaptureReply(error=str(error), fault="setting")
    return CaptureReply(error=f"{type(error).__name__}: {error}", fault="engine")
