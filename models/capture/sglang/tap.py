"""A generator's end of the connection to a server that has users."""

import socket
import time
from contextlib import ExitStack, suppress
from threading import Event
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from infra.files.sockets import connect
from infra.records.data_path import CaptureSpec
from infra.records.live import Attach, Attached, LiveRule, Taken
from infra.refusal import Refusal
from models.config.live import LiveConfig, LiveServerConfig
from models.run import RunWithTarget

REPLY_S = 10.0
POLL_S = 1.0
REMEDY = "start it with $DRAFTSMITH_LIVE={0} and Draftsmith's plugin installed (docs/live.md)"

Reply = TypeVar("Reply", bound=BaseModel)


class Tap:
    """Attached to a server for as long as this is open. Raises OSError where the server is away or busy."""

    def __init__(self, server: LiveServerConfig, wanted: Attach):
        self.server = server
        self._connection = connect(server.socket, REPLY_S)
        self._lines = self._connection.makefile("rb")
        with ExitStack() as undo:
            undo.callback(self.close)
            attached = self._ask(wanted.model_dump_json(), Attached)
            if attached.refused:
                raise Refusal(f"nothing can be learned from {server.address}: {attached.refused}")
            undo.pop_all()
        self.password = attached.password

    def take(self) -> Taken:
        """The next text; without one after about a second. Raises OSError."""
        return self._ask("{}", Taken)

    def _ask(self, line: str, kind: type[Reply]) -> Reply:
        self._connection.sendall(line.encode() + b"\n")
        reply = self._lines.readline()
        if not reply:
            raise ConnectionError(f"{self.server.address} closed the connection at {self.server.socket}")
        try:
            return kind.model_validate_json(reply)
        except ValidationError as error:
            raise Refusal(
                f"what listens at {self.server.socket} is no server of this version of Draftsmith ({error}): give both "
                "the same one"
            ) from error

    def close(self) -> None:
        """Detach. Idempotent; another thread that waits for a text is told so."""
        with suppress(OSError):  # the server has closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


def open_tap(server: LiveServerConfig, wanted: Attach, stopped: Event, timeout_s: float) -> Tap | None:
    """Attach as soon as the server can be reached; None once `stopped` is set.

    Raises Refusal, with the remedy, where that takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while not stopped.is_set():
        try:
            return Tap(server, wanted)
        except OSError as error:
            busy = isinstance(error, TimeoutError)
            why = "another run learns from it, or it hangs" if busy else f"{server.socket}: {error.strerror or error}"
            if time.monotonic() > deadline:
                remedy = "wait until that run ends" if busy else REMEDY.format(server.socket)
                raise Refusal(f"the server at {server.address} cannot be learned from ({why}): {remedy}") from error
        stopped.wait(POLL_S)
    return None


def wanted_of(run: RunWithTarget) -> Attach:
    """What the run's recipe asks of a server."""
    live = run.config.generator.live
    assert isinstance(live, LiveConfig), "only runs of generator.engine=serving attach to servers"
    rule = LiveRule(
        share=live.share,
        patience_s=live.patience_s,
        tenants=live.tenants,
        acceptance_at_most=live.acceptance_at_most,
        longest=run.config.data.max_tokens,
    )
    return Attach(spec=capture_spec_of(run), rule=rule)


def capture_spec_of(run: RunWithTarget) -> CaptureSpec:
    """What the plugin has to know of a run."""
    layout = run.layout
    return CaptureSpec(
        transport=run.config.transport,
        run=run.folder.path,
        aux_count=layout.aux_count,
        hidden_size=layout.hidden_size,
        dtype=run.config.generator.stored_dtype,
        top_token=layout.top_token,
    )
