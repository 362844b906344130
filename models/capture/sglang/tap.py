"""A generator's end of the connection to a server that has users."""

import select
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from infra.files.sockets import connect
from infra.records.data_path import CaptureSpec
from infra.records.live import Attach, Attached, LiveRule, Taken, rank_socket
from infra.refusal import Refusal
from infra.transport.choice import resolved
from models.config.live import LiveConfig, LiveServerConfig
from models.run import RunWithTarget

REPLY_S = 10.0
POLL_S = 1.0
REMEDY = "start it with $DRAFTSMITH_LIVE={0} and Draftsmith's plugin installed (docs/live.md)"

COUNTS = ("finished", "passed_over")
Reply = TypeVar("Reply", bound=BaseModel)


class _Rank:
    """The connection to one of a server's processes."""

    def __init__(self, server: LiveServerConfig, path: Path):
        self._server, self._path = server, path
        self.connection = connect(path, REPLY_S)
        self._lines = self.connection.makefile("rb")
        self.asked, self.taken = False, Taken()

    def attach(self, wanted: Attach) -> Attached:
        self._send(wanted.model_dump_json())
        attached = self.read(Attached)
        if attached.refused:
            raise Refusal(f"nothing can be learned from {self._server.address}: {attached.refused}")
        return attached

    def ask(self) -> None:
        """For the next text, unless it has not answered yet."""
        if not self.asked:
            self._send("{}")
        self.asked = True

    def _send(self, line: str) -> None:
        self.connection.sendall(line.encode() + b"\n")

    def read(self, kind: type[Reply]) -> Reply:
        """The reply to what was sent last."""
        reply = b"" if self._lines.closed else self._lines.readline()
        if not reply:
            raise ConnectionError(f"{self._server.address} closed the connection at {self._path}")
        self.asked = False
        try:
            return kind.model_validate_json(reply)
        except ValidationError as error:
            raise Refusal(
                f"what listens at {self._path} is no server of this version of Draftsmith ({error}): give both the "
                "same one"
            ) from error

    def check(self) -> None:
        """Raises OSError where the connection is closed. Reads nothing."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
        except ValueError as error:  # another thread has closed it
            raise ConnectionError(f"no longer attached to {self._server.address}") from error
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError(f"{self._server.address} closed the connection at {self._path}")

    def close(self) -> None:
        """Idempotent; another thread that waits for a text is told so."""
        with suppress(OSError):  # the server has closed it
            self.connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self.connection.close()


class Tap:
    """Attached to a server for as long as this is open. Raises OSError where the server is away or busy."""

    def __init__(self, server: LiveServerConfig, wanted: Attach):
        self.server = server
        self._ranks: list[_Rank] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            first = self._attach(0, wanted)
            self.password = first.password
            for rank in range(1, first.ranks):
                self._attach(rank, wanted.model_copy(update={"password": first.password}))
            undo.pop_all()

    def _attach(self, rank: int, wanted: Attach) -> Attached:
        self._ranks.append(_Rank(self.server, rank_socket(self.server.socket, rank)))
        return self._ranks[-1].attach(wanted)

    def take(self) -> Taken:
        """The next text of any rank; without one after about a second. Raises OSError."""
        for rank in self._ranks:
            rank.ask()
        try:
            ready, _, _ = select.select([rank.connection for rank in self._ranks], [], [], REPLY_S)
        except ValueError as error:  # another thread has closed them
            raise ConnectionError(f"no longer attached to {self.server.address}") from error
        if not ready:
            raise TimeoutError(f"{self.server.address} says nothing at {self.server.socket}")
        answering = next(rank for rank in self._ranks if rank.connection in ready)
        answering.taken = answering.read(Taken)
        # The others come first the next time.
        self._ranks.sort(key=lambda rank: rank is answering)
        finished, passed_over = (sum(getattr(rank.taken, name) for rank in self._ranks) for name in COUNTS)
        return Taken(text=answering.taken.text, finished=finished, passed_over=passed_over)

    def check(self) -> None:
        """Raises OSError where the server has closed the connection, as it does when it ends."""
        for rank in self._ranks:
            rank.check()

    def close(self) -> None:
        """Detach. Idempotent; another thread that waits for a text is told so."""
        for rank in self._ranks:
            rank.close()


def open_tap(server: LiveServerConfig, wanted: Attach, stopped: Event, timeout_s: float) -> Tap | None:
    """Attach as soon as the server can be reached, which is told once where it cannot; None once `stopped` is set.

    Raises Refusal, with the remedy, where that takes too long.
    """
    deadline, told = time.monotonic() + timeout_s, False
    while not stopped.is_set():
        try:
            return Tap(server, wanted)
        except OSError as error:
            busy = isinstance(error, TimeoutError)
            why = "another run learns from it, or it hangs" if busy else f"{server.socket}: {error.strerror or error}"
            remedy = "wait until that run ends" if busy else REMEDY.format(server.socket)
            if time.monotonic() > deadline:
                raise Refusal(f"the server at {server.address} cannot be learned from ({why}): {remedy}") from error
            if not told:
                print(f"waiting for the server at {server.address} ({why}; where that lasts, {remedy})", flush=True)
            told = True
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
        transport=resolved(run.config.transport, run.folder),
        run=run.folder.path,
        aux_count=layout.aux_count,
        hidden_size=layout.hidden_size,
        dtype=run.config.generator.stored_dtype,
        top_token=layout.top_token,
        embedded=layout.embedded,
    )
