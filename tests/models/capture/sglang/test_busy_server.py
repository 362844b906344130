"""A server of users that takes no request at the moment is asked again; one that has ended is waited for."""

from collections.abc import Callable
from threading import Event, Lock, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.records.data_path import CaptureReply, ObjectRecord
from infra.records.live import LiveText, Taken
from infra.sglang.client import Answer, ServerBusyError
from models.capture.engine import EngineError
from models.capture.live_texts import Learned
from models.capture.sglang import serving
from models.capture.sglang.outbox import NAME
from models.capture.sglang.serving import ServingEngine

RECORD = ObjectRecord(key="run/0/1/1", location="0+1", buffers=())
REPLY = CaptureReply(record=RECORD, put_s=0.0).model_dump()
BUSY = ServerBusyError("the server is too busy for a prompt of 3 tokens: 503 The request queue is full.")


class Tap:
    """A connection with one text."""

    password = "secret"

    def __init__(self) -> None:
        self.texts, self.ended, self.closed = [LiveText(prompt=(1, 2), answer=(3,))], False, False

    def take(self) -> Taken:
        return Taken(text=self.texts.pop() if self.texts else None)

    def check(self) -> None:
        if self.ended:
            raise ConnectionError("the server closed the connection")

    def close(self) -> None:
        self.closed = True


class Client:
    """Answers as told, one after the other; the last one for ever."""

    def __init__(self, *answers: Exception | Answer):
        self._answers, self.asked = list(answers), list[Any]()

    def generate(self, tokens: Any, sampling: Any, **more: Any) -> Answer:
        self.asked.append((list(tokens), sampling["custom_params"], more))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None: ...


CAPTURED = Answer([7], {NAME: [REPLY]})


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(serving, "BUSY_S", 0.01)

    def make(*answers: Exception | Answer) -> Any:
        engine: Any = object.__new__(ServingEngine)
        engine._stopped, engine._attaching, engine._tap, engine._client = Event(), Lock(), Tap(), Client(*answers)
        engine._server, engine._wanted = SimpleNamespace(address="the server"), None
        engine._filter = SimpleNamespace(
            learned=lambda text: Learned((*text.prompt, *text.answer), len(text.prompt)), summary=lambda *_: ""
        )
        engine._read, engine._captured, engine._restarted = 0, 0, False
        engine.run = SimpleNamespace(target=SimpleNamespace(media_ids=()))
        return engine

    return make


def test_a_busy_server_is_asked_again_for_the_same_text(engine_of: Callable[..., Any]) -> None:
    """Over the same connection: nothing is lost, and no canary is captured again."""
    engine = engine_of(BUSY, BUSY, CAPTURED)
    captured = engine.answer("run/0/1/1", torch.empty(0), 64)
    assert captured.record == RECORD
    assert captured.answer == (-2, -3, 3)
    assert [(tokens, custom) for tokens, custom, _ in engine._client.asked] == [
        ([1, 2, 3], {NAME: "run/0/1/1", "draftsmith_password": "secret"})
    ] * 3
    assert not engine._restarted
    assert not engine._tap.closed


def test_a_canary_waits_for_a_busy_server(engine_of: Callable[..., Any]) -> None:
    """At the start of a generator, which would otherwise end."""
    captured, tokens = engine_of(BUSY, CAPTURED).request("a-canary", torch.tensor([1, 2, 3]), (), serving.PREFILL)
    assert (captured.record, tokens) == (RECORD, [7])


def test_the_end_of_the_run_ends_the_wait(engine_of: Callable[..., Any]) -> None:
    engine = engine_of(BUSY)
    Timer(0.1, engine.interrupt).start()
    with pytest.raises(EngineError, match="the generator stops"):
        engine.answer("run/0/1/1", torch.empty(0), 64)


def test_a_server_that_ends_meanwhile_counts_as_restarted(
    engine_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway is busy for a server that is away; the next one does not know the password."""
    engine = engine_of(BUSY)
    tap = engine._tap
    tap.ended = True
    monkeypatch.setattr(serving, "open_tap", lambda *_: engine.interrupt())
    with pytest.raises(EngineError, match="the generator stops"):
        engine.answer("run/0/1/1", torch.empty(0), 64)
    assert tap.closed
    assert engine._restarted
