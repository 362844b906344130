"""The plugin without SGLang: prefills of any order and cut are written whole, and replies tell what happened."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch
from emulated_device import DEVICE, emulated_device
from fake_engine import FakeRequest, FakeStreamer, decode, fake_scheduler, prefill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.config import TransportConfig
from infra.files.run_folder import RunFolder
from infra.records.data_path import CaptureReply, CaptureSpec
from infra.transport.choice import open_transport, run_memory_folder
from models.capture.sglang import plugin
from models.capture.sglang.outbox import Outbox
from models.capture.sglang.plugin import Capture
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout

LAYOUT = HiddenStateLayout(3, 4, torch.float32)
Chunk = tuple[FakeRequest, int, int]


class Engine:
    """Runs prefills through the plugin; replies come by request."""

    def __init__(self, folder: Path):
        config = TransportConfig(kind="files", folder=str(folder))
        spec = CaptureSpec(
            transport=config, run=folder, aux_count=3, hidden_size=4, dtype="float32", top_token=False, embedded=False
        )
        self.capture, self.scheduler = Capture(spec), fake_scheduler()
        self.transport = open_transport(config, RunFolder(folder))
        self.replies: dict[str, Queue[CaptureReply]] = {}

    def run(self, *chunks: Chunk, damage: Callable[[HiddenStates], None] = lambda _: None, device: str = "cpu") -> None:
        batch, hidden = prefill(*chunks)
        damage(hidden)
        moved = HiddenStates(hidden.aux.to(device), hidden.last.to(device))
        self.submit(batch, self.capture._copies.start(moved, self.scheduler))

    def submit(self, batch, copy) -> None:
        for request, reply in zip(batch.reqs, self.capture.submit(batch, copy), strict=True):
            if reply is not None:
                self.replies[request.rid] = Queue()
                reply.when_known(self.replies[request.rid].put)

    def decode(self, *rows: tuple[FakeRequest, int]) -> None:
        batch, hidden = decode(*rows)
        self.capture.step(batch, self.capture._copies.start(hidden, self.scheduler))

    def finish(self, request: FakeRequest) -> None:
        """What the plugin does when the engine hands an answer over."""
        reply = self.capture.finish(request)
        if reply is not None:
            self.replies[request.rid] = Queue()
            reply.when_known(self.replies[request.rid].put)

    def reply(self, request: FakeRequest) -> CaptureReply:
        return self.replies[request.rid].get(timeout=300)

    def assert_written(self, *requests: FakeRequest) -> None:
        for request in requests:
            read = request.length + max(0, len(request.output_ids) - 1)
            reply, back = self.reply(request), LAYOUT.empty(read)
            assert reply.record is not None, reply.error
            self.transport.get(reply.record, LAYOUT.views(back))
            expected = request.rows(0, read)
            assert torch.equal(back.aux, expected.aux)
            assert torch.equal(back.last, expected.last)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


@pytest.fixture
def on_device() -> Iterator[str]:
    with emulated_device():
        yield str(DEVICE)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 5, 9, "retract", "abort"])), max_size=4)),
    st.data(),
)
def test_what_was_prefilled_is_written(tmp_path: Path, history: list[list[tuple[int, int | str]]], data) -> None:
    """Requests are finished for the engine before they are written, and others are aborted between their chunks."""
    # An example that is broken off leaves a writer behind, and the next one has requests of the same names.
    engine, serial, requests, complete = Engine(Path(mkdtemp(dir=tmp_path))), 0, {}, []
    for moves in history:
        chunks: list[Chunk] = []
        for slot, move in moves:
            if slot not in requests:
                serial += 1
                key = data.draw(st.sampled_from(["", "", None]))
                requests[slot] = [FakeRequest(str(serial), 3 + serial % 11, key), 0]
            request, reached = requests[slot]
            if any(request is one for one, *_ in chunks):
                continue
            if move == "retract":
                requests[slot][1] = 0
            elif move == "abort":
                request.ended = True
                del requests[slot]
            else:
                count = min(int(move), request.length - reached)
                chunks.append((request, reached, count))
                requests[slot][1] += count
                if requests[slot][1] == request.length:
                    complete.append(request)
                    del requests[slot]
        if chunks:
            engine.run(*chunks)
        for request, *_ in chunks:
            request.ended |= any(request is one for one in complete)
    captured = [request for request in complete if request.key is not None]
    engine.assert_written(*captured)
    assert engine.replies.keys() == {request.rid for request in captured}
    assert all(replies.empty() for replies in engine.replies.values())
    # What was aborted is forgotten with the next prefill.
    last = FakeRequest(str(serial + 1), 3)
    engine.run((last, 0, 3))
    engine.assert_written(last)
    assert len(engine.capture._unfinished) <= len(requests)


class Answering:
    """The engine's life of requests that are answered, with the next batch launched before the last one is read."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waiting: dict[str, tuple[FakeRequest, int]] = {}
        """Requests with the rows of theirs that are computed."""
        self.running: dict[str, tuple[FakeRequest, int]] = {}
        self._unread: list[FakeRequest] = []
        """Of the last batch, those that it gave a token."""
        self.done: list[FakeRequest] = []

    def prefill(self, chunk: int) -> None:
        chunks, emitting = [], []
        for rid, (request, reached) in [*self.waiting.items()]:
            whole = request.length + len(request.output_ids)
            count = min(chunk, whole - reached)
            chunks.append((request, reached, count))
            self.waiting[rid] = (request, reached + count)
            if reached + count == whole:
                emitting.append(request)
                self.running[rid] = self.waiting.pop(rid)
        if chunks:
            self.engine.run(*chunks)
        self._read(emitting)

    def decode(self) -> None:
        rows = [*self.running.values()]
        if rows:
            self.engine.decode(*rows)
        self.running = {request.rid: (request, reached + 1) for request, reached in rows}
        self._read([request for request, _ in rows])

    def _read(self, emitting: list[FakeRequest]) -> None:
        """Read what the batch before gave."""
        last, self._unread = self._unread, emitting
        for request in last:
            if request.finished():
                continue  # computed ahead
            request.output_ids.append(1)
            if len(request.output_ids) == request.max_new_tokens:
                self._end(request)
                self.done.append(request)

    def _end(self, request: FakeRequest) -> None:
        request.ended = True
        del self.running[request.rid]
        self.engine.finish(request)

    def retract(self, rid: str) -> None:
        """The engine never reads what a batch gave a request that it has taken back since."""
        request, _ = self.running.pop(rid)
        self.waiting[rid] = (request, 0)
        self._unread = [one for one in self._unread if one is not request]

    def abort(self, rid: str) -> None:
        request, _ = self.running[rid]
        request.aborted = True
        self._end(request)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_answers_are_written_with_their_prompts(tmp_path: Path, data: st.DataObject) -> None:
    """Prompts in chunks, answers of any length, retracted and aborted between any two steps."""
    life, serial = Answering(Engine(Path(mkdtemp(dir=tmp_path)))), 0
    for move in data.draw(st.lists(st.sampled_from(["come", "prefill", "decode", "decode", "retract", "abort"]))):
        if move == "come":
            serial += 1
            length, answer = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 5))
            life.waiting[str(serial)] = (FakeRequest(str(serial), length, max_new_tokens=answer), 0)
        elif move == "prefill":
            life.prefill(data.draw(st.integers(1, 4)))
        elif move == "decode":
            life.decode()
        elif life.running:
            (life.retract if move == "retract" else life.abort)(data.draw(st.sampled_from([*life.running])))
    while life.waiting or life.running:
        life.prefill(100)
        life.decode()
    life.engine.assert_written(*life.done)
    assert life.engine.replies.keys() == {request.rid for request in life.done}
    last = FakeRequest(str(serial + 1), 3)
    life.engine.run((last, 0, 3))
    life.engine.assert_written(last)
    assert not life.engine.capture._unfinished
    assert not len(life.engine.capture._writer.assembly)


def test_a_row_that_is_not_finite_fails_its_answer(engine: Engine) -> None:
    bad, good = (FakeRequest(str(rid), 2, max_new_tokens=3) for rid in (1, 2))
    engine.run((bad, 0, 2), (good, 0, 2))
    for position, damage in ((2, torch.nan), (3, 0.0)):
        batch, hidden = decode((bad, position), (good, position))
        hidden.last[0] += damage
        engine.capture.step(batch, engine.capture._copies.start(hidden, engine.scheduler))
    for request in (bad, good):
        request.output_ids, request.ended = [1, 1, 1], True
        engine.finish(request)
    assert engine.reply(bad).fault == "sample"
    engine.assert_written(good)


def test_prefills_are_written_in_order_when_their_copies_are_there(engine: Engine, on_device: str) -> None:
    requests = [FakeRequest(str(rid), 3) for rid in range(3)]
    for request in requests:
        engine.run((request, 0, 3), device=on_device)
    first, second, third = engine.scheduler.device_module.events
    second.happened.set()
    third.happened.set()
    assert not list(engine.transport.keys())
    first.happened.set()
    engine.assert_written(*requests)


def test_an_error_fails_its_request_alone(engine: Engine) -> None:
    bad, wrong, good = FakeRequest("1", 3), FakeRequest("2", 2, key="no/such+key"), FakeRequest("3", 4)
    engine.run((bad, 0, 3), (wrong, 0, 2), (good, 0, 4), damage=lambda hidden: hidden.last[1].fill_(torch.nan))
    assert engine.reply(bad) == CaptureReply(
        error="last has values that are not finite; try generator.compute_dtype=float32", fault="sample"
    )
    assert engine.reply(wrong) == CaptureReply(error="AssertionError: no/such+key", fault="engine")
    engine.assert_written(good)


def test_rows_of_another_shape_than_the_run_s(engine: Engine) -> None:
    request = FakeRequest("1", 3)
    batch, hidden = prefill((request, 0, 3))
    engine.submit(batch, engine.capture._copies.start(HiddenStates(hidden.aux[:, :8], hidden.last), engine.scheduler))
    assert engine.reply(request).error == "aux has shape [3, 8], the run needs [3, 12]"


def test_what_never_reached_the_host_is_told_with_the_last_chunk(engine: Engine) -> None:
    cut, other = FakeRequest("1", 6), FakeRequest("2", 1)
    batch, _ = prefill((cut, 0, 2), (other, 0, 1))
    engine.submit(batch, MemoryError("CUDA out of memory"))
    engine.run((cut, 2, 4))
    for request in (cut, other):
        assert engine.reply(request) == CaptureReply(error="MemoryError: CUDA out of memory", fault="engine")
    engine.run((cut, 0, 6))
    engine.assert_written(cut)
    assert len(engine.capture._writer.assembly) == 0


def test_a_store_that_fails_is_told_and_the_next_request_is_written(engine: Engine, tmp_path: Path) -> None:
    before, failed, after = (FakeRequest(str(rid), 3) for rid in range(3))
    engine.run((before, 0, 3))
    engine.assert_written(before)
    (folder,) = tmp_path.rglob("objects")
    away = folder.rename(folder.with_name("away"))
    engine.run((failed, 0, 3))
    reply = engine.reply(failed)
    assert (reply.record, reply.fault) == (None, "engine")
    assert str(reply.error).startswith("TransferError: cannot write")
    away.rename(folder)
    engine.run((after, 0, 3))
    engine.assert_written(after)


WRITER_THAT_ENDS = """
import signal, subprocess, sys
signal.signal(signal.SIGQUIT, lambda *_: sys.exit(7))
server = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
server.wait(600)
"""
SCHEDULER = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from fake_engine import FakeRequest, prefill
from models.capture.sglang import host_copies
from test_writer import Engine
host_copies.COPY_S = 0.0
engine, request = Engine(Path(sys.argv[1])), FakeRequest("1", 3)
batch, hidden = prefill((request, 0, 3))
copy = engine.capture._copies.start(hidden, None)
copy.copied, copy.sources = engine.scheduler.device_module.Event(), (hidden.aux,)
engine.submit(batch, copy)
time.sleep(600)
"""


def test_a_writer_that_ends_takes_the_server_along(tmp_path: Path) -> None:
    """The server's main process is told as by SGLang's own processes; nobody waits for a reply that never comes."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", WRITER_THAT_ENDS, SCHEDULER, str(tmp_path), str(here), str(here.parents[2])]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.wait(300) == 7
            assert server.stderr is not None
            # The server is told before the thread's traceback is printed.
            assert any("TimeoutError: hidden states were not copied to the host within 0 s" in x for x in server.stderr)
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def test_a_server_of_users_makes_no_place_that_the_generator_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with a shared memory of its own."""
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path))
    config, run = TransportConfig(budget_mib=1), tmp_path / "a-run"
    spec = CaptureSpec(
        transport=config, run=run, aux_count=3, hidden_size=4, dtype="float32", top_token=False, embedded=False
    )
    run.mkdir()

    def reply(request: FakeRequest) -> CaptureReply:
        capture, replies = Capture(spec, serves=True), Queue[CaptureReply]()
        batch, hidden = prefill((request, 0, request.length))
        (pending,) = capture.submit(batch, capture._copies.start(hidden, fake_scheduler()))
        assert pending is not None
        pending.when_known(replies.put)
        capture.close()
        return replies.get(timeout=300)

    failed = reply(FakeRequest("1", 5))
    assert failed.fault == "setting"
    assert failed.error is not None
    assert "does not see the run's folder" in failed.error
    assert not run_memory_folder(RunFolder(run)).exists()
    open_transport(config, RunFolder(run)).close()
    assert reply(FakeRequest("2", 5)).record is not None


def test_no_part_of_a_captured_answer_leaves_before_its_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sends every fifty tokens by a socket of its own; the end, which leaves by ours, might overtake them."""
    sent = Queue[tuple[str, str]]()

    def stream(streamer: FakeStreamer, requests: list[FakeRequest], _return_logprob: bool) -> None:
        for request in requests:
            streamer.send_to_detokenizer.send_output(SimpleNamespace(rid=request.rid, customized_info=None))

    monkeypatch.setattr(plugin, "_own_capture", lambda: engine.capture)
    monkeypatch.setattr(plugin, "_outbox", lambda _: Outbox(lambda message, _: sent.put((message.rid, "ours"))))
    streamer = FakeStreamer(SimpleNamespace(send_output=lambda message: sent.put((message.rid, "the engine's"))))
    captured, another = FakeRequest("1", 3, max_new_tokens=4), FakeRequest("2", 3, None, max_new_tokens=4)
    engine.run((captured, 0, 3), (another, 0, 3))
    plugin.hold_replies(stream, streamer, [captured, another], False)
    engine.decode((captured, 3))
    captured.output_ids, captured.ended = [1, 2], True
    plugin.hold_replies(stream, streamer, [captured], False)
    assert [sent.get(timeout=300) for _ in range(2)] == [("2", "the engine's"), ("1", "ours")]
    assert sent.empty()
