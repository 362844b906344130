"""Answers of captured requests on their way out of the engine: they leave when the object is written."""

import threading
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from infra.records.data_path import CaptureReply

NAME = "draftsmith"
"""Name of the request parameter and of the reply."""
Send = Callable[[Any, dict[str, Any]], None]
"""Sends one of SGLang's messages with additional information about its request."""


class PendingReply:
    """A reply that leaves once it is known and the engine has finished the request, in whichever order.

    The writer's thread calls `give`, the scheduler's `when_known`; the second of them sends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reply: CaptureReply | None = None
        self._send: Callable[[CaptureReply], None] | None = None

    def give(self, reply: CaptureReply) -> None:
        with self._lock:
            self._reply, send = reply, self._send
        if send is not None:
            send(reply)

    def when_known(self, send: Callable[[CaptureReply], None]) -> None:
        with self._lock:
            self._send, reply = send, self._reply
        if reply is not None:
            send(reply)


class Outbox:
    """Takes finished answers from SGLang's output streamer, and sends each when its reply is known."""

    def __init__(self, send: Send):
        self._send, self._lock = send, threading.Lock()
        self._messages: list[Any] = []

    def hold(self, stream_output: Callable[..., None], streamer: Any, request: Any, *rest: Any, **named: Any) -> None:
        """Let SGLang make the message of a request whose reply is pending; a request that goes on makes none yet."""
        reply = request.customized_info.pop(NAME)[0]
        streamer = copy(streamer)
        streamer.send_to_detokenizer = self
        stream_output(streamer, [request], *rest, **named)
        if self._messages:
            reply.when_known(partial(self._send_with, self._messages.pop()))
        else:
            request.customized_info[NAME] = [reply]

    def send_output(self, message: Any) -> None:
        """What the streamer calls in place of its own sender."""
        self._messages.append(message)

    def _send_with(self, message: Any, reply: CaptureReply) -> None:
        with self._lock:
            self._send(message, {NAME: [[reply.model_dump(mode="json")]]})


def note(request: Any, reply: PendingReply) -> None:
    """Note a pending reply for a request. The engine passes on what it finds there, with every part of an answer."""
    request.customized_info = (request.customized_info or {}) | {NAME: [reply]}


def is_pending(request: Any) -> bool:
    """Whether the engine has noted a pending reply for a request, and not handed its answer over yet."""
    return isinstance(((request.customized_info or {}).get(NAME) or [None])[0], PendingReply)


def open_sender(sender: Any) -> Send:
    """A sender to where SGLang's `SenderWrapper` sends, for other threads than the scheduler's."""
    import zmq  # pyright: ignore[reportMissingImports]
    from sglang.srt.managers import io_struct  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils.network import get_zmq_socket  # pyright: ignore[reportMissingImports]

    endpoint = sender.socket.last_endpoint.decode()
    socket = get_zmq_socket(sender.socket.context, zmq.PUSH, endpoint, False)

    def send(message: Any, information: dict[str, Any]) -> None:
        others = io_struct.unwrap_from_pickle(message.customized_info) or {}
        message.customized_info = io_struct.wrap_as_pickle(others | information)
        io_struct.sock_send(socket, message)

    return send
