"""The plugin in an engine that serves users: one run at a time learns from a share of the finished requests.

$DRAFTSMITH_LIVE names a Unix socket that only the server's own user may open. While a generator is connected to it

    scheduler  stream_output: a request that has finished is noted, and nothing else
    listener   keeps the token ids of those that the run's rule wants, in memory, and hands such a text to the generator
               when the server has nothing to do, or has had something to do for long
    generator  searches it for private data, and has it captured: a request of its own, which prefills the text
    scheduler  captures that request as any engine of Draftsmith does, see models.capture.sglang.plugin

Users' requests are read when they are over and never wait: nothing is copied for them, and what nobody fetches in time
is forgotten. Their own rows are not used: with a prefix cache they begin somewhere in the text, with speculation they
hold what was rejected, and keeping them would burden every step of every request. To read one text in twenty again
costs a prefill of that text alone (docs/live.md has both costs). The generator's requests have a cache of their own
(`extra_key`), so that all of their rows are computed, and a password that was agreed on over the connection: no user
can have anything captured.

When the connection ends, however it does, everything is forgotten. A server with several copies, or with data-parallel
attention, has a socket for each: the first one at the named path, the others beside it.
"""

import hashlib
import secrets
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.files.run_folder import RunFolder
from infra.files.sockets import listen
from infra.records.data_path import CaptureSpec
from infra.records.live import Attach, Attached, LiveRule, LiveText, Taken
from infra.transport.choice import missing_place, unseen
from models.capture.sglang.outbox import NAME

PASSWORD = "draftsmith_password"
"""Name of the request parameter beside the object's key."""
NOTED = 64
"""Finished requests until the listener looks at them; older ones are forgotten, and counted as passed over."""
QUEUED = 16
"""Texts that wait for the generator; the oldest is forgotten for a newer one."""
WAIT_S = 1.0
"""Longest time until the generator hears that there is no text."""
POLL_S = 0.01
HEALTH = "HEALTH_CHECK"
"""How the ids of SGLang's own requests begin."""


KeyOf = Callable[[Any], str | None]
"""Key of the object to write for a request; None for requests of others."""
MakeCapture = Callable[[CaptureSpec, KeyOf], Any]
"""Makes what captures the requests of one run, until its `close`."""


class Attachment:
    """A run that learns from this server now."""

    def __init__(self, wanted: Attach, make: MakeCapture, idle: Callable[[], bool]):
        # Any rank may be given a run's request, so all of them know it by the same one.
        self._idle, self.password = idle, wanted.password or secrets.token_hex(16)
        self.capture, self._rule = make(wanted.spec, self.key), wanted.rule
        self.finished: deque[Any] = deque(maxlen=NOTED)
        """Requests that the listener has not looked at."""
        self._noted = 0
        """All requests so far, forgotten ones included. Only the scheduler writes it."""
        self._texts: deque[LiveText] = deque(maxlen=QUEUED)
        self._since = 0.0
        """When the first of them came, or the last one before them was handed out."""
        self._read = self._passed_over = 0

    def note(self, request: Any) -> None:
        """Keep a request that has finished until the listener looks at it. Never waits."""
        self.finished.append(request)
        self._noted += 1

    def key(self, request: Any) -> str | None:
        custom = _custom(request)
        # As bytes: a user's text in other letters than ASCII's would raise, in the scheduler.
        given = str(custom.get(PASSWORD)).encode(errors="replace")
        return custom.get(NAME) if secrets.compare_digest(given, self.password.encode()) else None

    def take(self) -> Taken:
        """The oldest text that waits; None after a while without one, or without a moment for it."""
        deadline = time.monotonic() + WAIT_S
        while (text := self._due()) is None and time.monotonic() < deadline:
            # Nobody tells when the server has nothing to do, and a scheduler that did would have to hold a lock.
            time.sleep(POLL_S)
        noted = self._noted
        forgotten = max(0, noted - self._read - len(self.finished))
        return Taken(text=text, finished=noted, passed_over=self._passed_over + forgotten)

    def _due(self) -> LiveText | None:
        while self.finished:
            self._keep(self.finished.popleft())
        now = time.monotonic()
        if not self._texts or not (self._idle() or now - self._since > self._rule.patience_s):
            return None
        self._since = now
        return self._texts.popleft()

    def _keep(self, request: Any) -> None:
        self._read += 1
        if not wants(self._rule, request):
            return
        prompt, longest = tuple(request.origin_input_ids), self._rule.longest
        # What the user got: a verification step may have gone on after the end of the answer.
        answer = tuple(request.output_ids_through_stop)
        text = LiveText(prompt=prompt, answer=answer[: longest - len(prompt)])
        if not self._texts:
            self._since = max(self._since, time.monotonic())
        self._passed_over += len(self._texts) == QUEUED
        self._texts.append(text)


class Live:
    """Listens for generators, one at a time.

    Args:
        path: of the socket. Raises Refusal as `listen` does.
        make: see `MakeCapture`.
        idle: whether the server has nothing to do at the moment.
        obstacle: why no run can learn from this server; empty: it can.
        ranks: how many of the server's processes have requests of their own, and listen.
    """

    def __init__(
        self,
        path: Path,
        make: MakeCapture,
        idle: Callable[[], bool] = lambda: True,
        obstacle: str = "",
        ranks: int = 1,
    ):
        self._make, self._idle, self._obstacle, self._ranks = make, idle, obstacle, ranks
        self.attachment: Attachment | None = None
        self._listener = listen(path)
        self._thread = threading.Thread(target=self._run, name="live generator", daemon=True)
        self._thread.start()

    def offer(self, request: Any) -> None:
        """Called by the scheduler, which must not wait, for every request that it hands on, also again and again."""
        attachment = self.attachment
        if attachment is not None and request.finished() and not request.finished_output:
            attachment.note(request)

    def close(self) -> None:
        """Listen no longer."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                with connection:
                    self._talk(connection)
            except (OSError, ValueError):
                # A generator that died, or something else that spoke to this socket: the server goes on.
                traceback.print_exc()
            finally:
                ended, self.attachment = self.attachment, None
                if ended is not None:
                    ended.capture.close()

    def _talk(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            for line in lines:
                attached = self.attachment
                reply = self._attach(Attach.model_validate_json(line)) if attached is None else attached.take()
                connection.sendall(reply.model_dump_json().encode() + b"\n")

    def _attach(self, wanted: Attach) -> Attached:
        if self._obstacle:
            return Attached(refused=self._obstacle)
        # A server in a container of its own would make places for the run's objects that nobody else sees.
        if (place := missing_place(wanted.spec.transport, RunFolder(wanted.spec.run))) is not None:
            return Attached(refused=unseen(place))
        self.attachment = attachment = Attachment(wanted, self._make, self._idle)
        return Attached(password=attachment.password, ranks=self._ranks)


def _custom(request: Any) -> dict[str, Any]:
    """A request's own parameters, which users choose."""
    custom = request.sampling_params.custom_params
    return custom if isinstance(custom, dict) else {}


def wants(rule: LiveRule, request: Any) -> bool:
    """Whether a rule wants a request of SGLang's that has finished.

    Left out are requests with more than text, those of adapters, aborted ones, the server's own and those of runs.
    """
    own = request.rid.startswith(HEALTH) or PASSWORD in _custom(request)
    aborted = request.finished_reason.to_json()["type"] == "abort"
    more = request.multimodal_inputs is not None or request.input_embeds is not None or request.lora_id is not None
    if own or aborted or more or (rule.tenants and request.routing_key not in rule.tenants):
        return False
    asked, answered, steps = len(request.origin_input_ids), len(request.output_ids_through_stop), request.spec_verify_ct
    if answered < 2 or asked + 2 > rule.longest:
        return False
    if rule.acceptance_at_most is not None and steps and answered / steps > rule.acceptance_at_most:
        return False
    place = int.from_bytes(hashlib.blake2b(request.rid.encode(), digest_size=8).digest())
    return place < rule.share * 2**64
