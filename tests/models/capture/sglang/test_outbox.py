"""A request's answer leaves once, with its reply, whichever of engine and writer is faster."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeRequest, FakeStreamer

from infra.records.data_path import CaptureReply
from models.capture.sglang.outbox import NAME, Outbox, PendingReply, is_pending

REPLY = CaptureReply(error="none of its values", fault="sample")


class Wire:
    """What left, by the engine's own sender and by ours."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.outbox = Outbox(lambda message, information: self.sent.append((message.rid, information)))
        sender = SimpleNamespace(send_output=lambda message: self.sent.append((message.rid, message.customized_info)))
        self.streamer = FakeStreamer(sender)

    def hold(self, request: FakeRequest) -> None:
        self.outbox.hold(FakeStreamer.stream_output, self.streamer, request, False)


def captured(ended: bool = True) -> tuple[FakeRequest, PendingReply]:
    reply = PendingReply()
    return FakeRequest("7", 3, ended=ended, customized_info={NAME: [reply]}), reply


EXPECTED = [("7", {NAME: [[REPLY.model_dump(mode="json")]]})]


@pytest.mark.parametrize("writer_first", [True, False])
def test_an_answer_leaves_when_both_have_come(writer_first: bool) -> None:
    wire, (request, reply) = Wire(), captured()
    first, second = (lambda: reply.give(REPLY), lambda: wire.hold(request))[:: 1 if writer_first else -1]
    first()
    assert wire.sent == []
    second()
    assert wire.sent == EXPECTED
    assert not is_pending(request)


def test_an_answer_leaves_once_when_both_come_together() -> None:
    for _ in range(200):
        wire, (request, reply), start = Wire(), captured(), Barrier(2, timeout=60)

        def give(reply: PendingReply = reply, start: Barrier = start) -> None:
            start.wait()
            reply.give(REPLY)

        with ThreadPoolExecutor(1) as thread:
            given = thread.submit(give)
            start.wait()
            wire.hold(request)
            given.result(60)
        assert wire.sent == EXPECTED


def test_a_request_that_goes_on_is_held_when_it_finishes() -> None:
    wire, (request, reply) = Wire(), captured(ended=False)
    wire.hold(request)
    reply.give(REPLY)
    assert wire.sent == []
    assert is_pending(request)
    request.ended = True
    wire.hold(request)
    assert wire.sent == EXPECTED


def test_requests_of_others_are_not_pending() -> None:
    assert not is_pending(FakeRequest("1", 3))
    assert not is_pending(FakeRequest("1", 3, customized_info={"other": [1]}))
    assert not is_pending(FakeRequest("1", 3, customized_info={NAME: [None]}))
