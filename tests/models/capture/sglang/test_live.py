"""How a serving engine's plugin and a generator speak, and which requests a rule wants."""

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from infra.config import TransportConfig
from infra.files.sockets import connect, listen
from infra.records.data_path import CaptureSpec
from infra.records.live import Attach, LiveRule, Taken, rank_socket
from infra.refusal import Refusal
from infra.settings import CAPTURE, live_socket
from models.capture.sglang.live import NOTED, PASSWORD, QUEUED, Live, wants
from models.capture.sglang.tap import Tap, open_tap
from models.config.live import LiveServerConfig
from tests.models.capture.sglang.fake_engine import FakeRequest

LONGEST = 64


class Recorder:
    """What captures, as far as the listener knows."""

    def __init__(self, spec: CaptureSpec, key: Callable[[Any], str | None]):
        self.spec, self.key, self.closed = spec, key, threading.Event()

    def close(self) -> None:
        self.closed.set()


def wanted(run: Path = Path(__file__).parent, transport: TransportConfig | None = None, **rule: Any) -> Attach:
    spec = CaptureSpec(
        transport=transport or TransportConfig(),
        run=run,
        aux_count=3,
        hidden_size=4,
        dtype="float32",
        top_token=False,
        embedded=False,
    )
    return Attach(spec=spec, rule=LiveRule(**{"share": 1.0, "longest": LONGEST} | rule))


def user_request(rid: str = "a", prompt: int = 10, **changes: Any) -> FakeRequest:
    return FakeRequest(rid, prompt, None, **{"output_ids": [7, 8, 9], "ended": True} | changes)


@pytest.fixture
def place(path_in_memory: Path) -> LiveServerConfig:
    """In a folder with a short name: a socket's path has 100 bytes at most."""
    return LiveServerConfig(address="http://127.0.0.1:1", socket=path_in_memory / "live.sock")


@pytest.fixture
def live(place: LiveServerConfig) -> Iterator[Live]:
    live = Live(place.socket, Recorder)
    yield live
    live.close()


def test_finished_requests_reach_the_generator_once(live: Live, place: LiveServerConfig) -> None:
    live.offer(user_request("before anybody listens"))
    tap = Tap(place, wanted())
    running = user_request("b", ended=False)
    for request in (running, user_request("c", 12), user_request("d", 3, finished_output=True)):
        live.offer(request)
    taken = tap.take()
    assert taken.text is not None
    assert (taken.text.prompt, taken.text.answer) == ((0,) * 12, (7, 8, 9))
    assert taken.finished == 1
    assert tap.take().text is None
    tap.close()


def test_the_ranks_of_a_server_are_one_to_the_generator(place: LiveServerConfig) -> None:
    """All know the run's requests by one password; the texts of each reach it, and counts are of all."""
    with ExitStack() as stack:
        ranks = [Live(rank_socket(place.socket, rank), Recorder, ranks=3) for rank in range(3)]
        for live in ranks:
            stack.callback(live.close)
        tap = stack.enter_context(closing(Tap(place, wanted())))
        assert {one.attachment.password for one in ranks if one.attachment} == {tap.password}
        for rank, live in enumerate(ranks):
            live.offer(user_request(f"a{rank}", 10 + rank))
            live.offer(user_request(f"b{rank}", 20 + rank))
        taken = list[Taken]()
        for _ in range(6):
            # Which of several that have answered is first: one alone may be first on a busy machine.
            for asked in tap._ranks:
                asked.ask()
                assert select.select([asked.connection], [], [], 30.0)[0]
            taken.append(tap.take())
        assert sorted(len(one.text.prompt) for one in taken if one.text) == [10, 11, 12, 20, 21, 22]
        assert len({len(one.text.prompt) % 10 for one in taken[:3] if one.text}) == 3
        assert taken[-1].finished == 6
        assert tap.take().text is None


def test_whoever_waits_for_a_text_is_told_that_the_connection_is_closed(live: Live, place: LiveServerConfig) -> None:
    tap = Tap(place, wanted())
    assert tap.take().text is None
    tap.close()
    for _ in range(2):
        with pytest.raises(OSError):
            tap.take()
    tap._ranks[0].asked = True  # closed by another thread after the question
    with pytest.raises(ConnectionError, match="no longer attached"):
        tap.take()


def test_a_server_of_which_a_rank_does_not_listen_yet_is_waited_for(place: LiveServerConfig) -> None:
    with ExitStack() as stack:
        first = Live(place.socket, Recorder, ranks=2)
        stack.callback(first.close)
        with pytest.raises(FileNotFoundError):
            Tap(place, wanted())
        stack.callback(Live(rank_socket(place.socket, 1), Recorder, ranks=2).close)
        tap = open_tap(place, wanted(), threading.Event(), 60.0)
        assert tap is not None
        tap.close()


def test_texts_are_cut_and_the_oldest_forgotten(live: Live, place: LiveServerConfig) -> None:
    tap = Tap(place, wanted())
    for index in range(QUEUED + 3):
        live.offer(user_request(str(index), LONGEST - 2, output_ids=[index, 1, 2, 3]))
    taken = tap.take()
    assert taken.text is not None
    assert taken.text.answer == (3, 1)
    assert taken.passed_over == 3
    tap.close()


def test_requests_of_a_burst_are_counted_though_nobody_has_looked_at_them(live: Live, place: LiveServerConfig) -> None:
    tap = Tap(place, wanted())
    for index in range(NOTED + 10):
        live.offer(user_request(str(index)))
    taken = tap.take()
    assert (taken.finished, taken.passed_over) == (NOTED + 10, NOTED + 10 - QUEUED)
    tap.close()


def test_what_a_verification_step_adds_after_the_end_is_not_learned(live: Live, place: LiveServerConfig) -> None:
    tap = Tap(place, wanted())
    live.offer(user_request("a", 10, output_ids=[20, 21, 22, 2, 55, 56], finished_len=4))
    taken = tap.take()
    assert taken.text is not None
    assert taken.text.answer == (20, 21, 22, 2)
    tap.close()


def test_texts_wait_for_a_moment_in_which_nobody_is_served(place: LiveServerConfig) -> None:
    busy = threading.Event()
    busy.set()
    live = Live(place.socket, Recorder, lambda: not busy.is_set())
    tap = Tap(place, wanted(patience_s=3600))
    live.offer(user_request("a", 10))
    assert tap.take().text is None
    busy.clear()
    assert tap.take().text is not None
    tap.close()
    live.close()


def test_a_server_that_is_always_busy_is_learned_from_too(place: LiveServerConfig) -> None:
    """Also where requests are forgotten for newer ones before any has waited for long enough."""
    live, stop = Live(place.socket, Recorder, lambda: False), threading.Event()
    tap = Tap(place, wanted(patience_s=0.5))

    def serve() -> None:
        for number in count():
            live.offer(user_request(f"request {number}"))
            if stop.wait(0.005):
                return

    thread = threading.Thread(target=serve)
    thread.start()
    taken = [tap.take() for _ in range(3)]
    stop.set()
    thread.join()
    tap.close()
    live.close()
    assert taken[-1].passed_over > QUEUED
    assert any(one.text is not None for one in taken)


def test_only_the_run_has_its_requests_captured(live: Live, place: LiveServerConfig) -> None:
    tap = Tap(place, wanted())
    assert live.attachment is not None
    key = live.attachment.capture.key
    assert key(FakeRequest("1", 5, custom={PASSWORD: tap.password})) == "run/0/1/1"
    for custom in ({}, {PASSWORD: ""}, {PASSWORD: "guess"}, {PASSWORD: "ü"}, {PASSWORD: "\ud800"}, [1], 3):
        assert key(FakeRequest("1", 5, custom=custom)) is None
    tap.close()


def test_everything_is_forgotten_when_the_generator_goes(live: Live, place: LiveServerConfig) -> None:
    first = Tap(place, wanted())
    assert live.attachment is not None
    recorder, password = live.attachment.capture, first.password
    live.offer(user_request())
    first.close()
    assert recorder.closed.wait(10)
    second = Tap(place, wanted())
    assert second.password != password
    assert second.take().text is None
    second.close()


def test_a_second_run_is_told_to_wait(live: Live, place: LiveServerConfig, monkeypatch: Any) -> None:
    monkeypatch.setattr("models.capture.sglang.tap.REPLY_S", 0.2)
    first = Tap(place, wanted())
    with pytest.raises(Refusal, match="another run learns from it"):
        open_tap(place, wanted(), threading.Event(), 0.0)
    first.close()


def test_a_server_that_cannot_be_learned_from_says_why(place: LiveServerConfig) -> None:
    live = Live(place.socket, Recorder, obstacle="it has data-parallel copies")
    with pytest.raises(Refusal, match=r"127\.0\.0\.1:1: it has data-parallel copies"):
        Tap(place, wanted())
    live.close()


@pytest.mark.parametrize("missing", ["a-run", "shm/draftsmith-a-run", ""])
def test_a_server_in_a_container_that_does_not_see_the_run_says_so(
    live: Live, place: LiveServerConfig, tmp_path: Path, missing: str
) -> None:
    """It would make places of its own for what it captures, which nobody reads and nobody removes."""
    for name in {"a-run", "shm/draftsmith-a-run"} - {missing}:
        (tmp_path / name).mkdir(parents=True)
    asked = wanted(tmp_path / "a-run", TransportConfig(kind="arena", folder=str(tmp_path / "shm")))
    if missing:
        with pytest.raises(Refusal, match=rf"does not see the run's folder {tmp_path / missing}: .*--ipc=host"):
            Tap(place, asked)
        assert not (tmp_path / missing).exists()
        assert live.attachment is None
    else:
        Tap(place, asked).close()


def test_a_server_that_ends_is_noticed_without_asking_it(live: Live, place: LiveServerConfig) -> None:
    tap = Tap(place, wanted())
    live.offer(user_request())
    tap._ranks[0].ask()
    assert select.select([tap._ranks[0].connection], [], [], 30.0)[0]
    tap.check()  # what the server has said stays to be read
    assert tap.take().text is not None
    tap._ranks[0].connection.sendall(b"nonsense\n")
    tap._ranks[0].connection.shutdown(socket.SHUT_WR)
    while tap._ranks[0].connection.recv(1000):
        """What was said before the end."""
    with pytest.raises(ConnectionError, match="closed the connection"):
        tap.check()
    tap.close()
    with pytest.raises(ConnectionError, match="no longer attached"):
        tap.check()


def test_nonsense_does_not_stop_the_listener(live: Live, place: LiveServerConfig) -> None:
    for line in (b"\n", b"{}\n", b"\xff\xfe\n", json.dumps([1]).encode() + b"\n"):
        with connect(place.socket, 10.0) as connection:
            connection.sendall(line)
            assert connection.recv(10) == b""
    tap = Tap(place, wanted())
    tap.close()


def test_nobody_listening_is_a_refusal_with_the_remedy(place: LiveServerConfig) -> None:
    with pytest.raises(Refusal, match="DRAFTSMITH_LIVE="):
        open_tap(place, wanted(), threading.Event(), 0.0)
    stopped = threading.Event()
    stopped.set()
    assert open_tap(place, wanted(), stopped, 60.0) is None


def test_waiting_for_a_server_is_told_once(
    place: LiveServerConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("models.capture.sglang.tap.POLL_S", 0.0)
    stopped, ends = threading.Event(), iter((False, False, False, True))
    monkeypatch.setattr(stopped, "is_set", lambda: next(ends))
    assert open_tap(place, wanted(), stopped, 60.0) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"waiting for the server at {place.address} (")


def test_another_program_at_the_socket(place: LiveServerConfig) -> None:
    listener = listen(place.socket)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(b"HTTP/1.1 400\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(Refusal, match="no server of this version"):
        Tap(place, wanted())
    thread.join()
    listener.close()


def test_sockets_belong_to_their_owner(path_in_memory: Path) -> None:
    path = path_in_memory / "live.sock"
    listener = listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Refusal, match="another process listens"):
        listen(path)
    listener.close()
    listen(path).close()  # of a dead process
    with pytest.raises(Refusal, match="in a folder of this user"):
        listen(path_in_memory / "missing" / "live.sock")
    with pytest.raises(Refusal, match="too long"):
        listen(path_in_memory / ("x" * 100))
    assert isinstance(listener, socket.socket)


@pytest.mark.parametrize(
    ("rule", "request_of_user", "expected"),
    [
        ({}, user_request(), True),
        ({}, user_request(aborted=True), False),
        ({}, user_request("HEALTH_CHECK_1"), False),
        ({}, user_request(custom={PASSWORD: "of a run"}), False),
        ({}, user_request(custom=3), True),
        ({}, user_request(multimodal_inputs=object()), False),
        ({}, user_request(lora_id="adapter"), False),
        ({}, user_request(input_embeds=[0.0]), False),
        ({}, user_request(output_ids=[7]), False),
        ({}, user_request(prompt=LONGEST - 1), False),
        ({"tenants": ("one", "two")}, user_request(routing_key="two"), True),
        ({"tenants": ("one", "two")}, user_request(), False),
        ({"acceptance_at_most": 2.0}, user_request(spec_verify_ct=1), False),
        ({"acceptance_at_most": 2.0}, user_request(spec_verify_ct=2), True),
        ({"acceptance_at_most": 2.0}, user_request(), True),
        ({"share": 0.0}, user_request(), False),
    ],
)
def test_what_a_rule_wants(rule: dict[str, Any], request_of_user: FakeRequest, expected: bool) -> None:
    assert wants(wanted(**rule).rule, request_of_user) is expected


def test_a_share_is_a_share_and_always_the_same_requests() -> None:
    rules = [wanted(share=share).rule for share in (0.05, 0.2)]
    chosen = [{rid for rid in range(20_000) if wants(rule, user_request(f"request {rid}"))} for rule in rules]
    assert chosen[0] < chosen[1]
    for rule, those in zip(rules, chosen, strict=True):
        # Six standard errors.
        assert abs(len(those) / 20_000 - rule.share) < 6 * (rule.share * (1 - rule.share) / 20_000) ** 0.5


def test_the_engine_of_a_run_does_not_listen_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody has set the variable for every process."""
    monkeypatch.setenv("DRAFTSMITH_LIVE", "/run/draftsmith/a.sock")
    assert live_socket() == Path("/run/draftsmith/a.sock")
    monkeypatch.setenv(CAPTURE, wanted().spec.model_dump_json())
    assert live_socket() is None
