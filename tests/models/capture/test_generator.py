"""Who is to blame for a failed capture: only what a healthy engine cannot capture counts against a sample."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from sqlalchemy import event
from torch import Tensor

from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.records.data_path import SampleProgress
from infra.records.drafts import CapturePrecision
from models.capture.engine import Captured, EngineError
from models.capture.generator import Generator, main
from models.capture.heldout import read_heldout
from models.capture.plain_engine import PlainEngine
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates

SMALL = ("data.max_samples=12", "data.max_tokens=64", "training.samples_per_step=4")
MakeRun = Callable[..., RunFolder]


@pytest.fixture
def run(make_run: MakeRun) -> PreparedRun:
    """A prepared run whose first epoch is open."""
    return opened(make_run("run", *SMALL))


def opened(folder: RunFolder) -> PreparedRun:
    run = PreparedRun.open(folder.path)
    with run.open_ledger() as ledger:
        ledger.open_epoch(None, 0, run.epoch_slots(0))
    return run


class LostDevice(PlainEngine):
    """Its canary passed at the start; the device is gone since."""

    def prefill(self, tokens: Tensor, images: Sequence[Path] = ()) -> HiddenStates:
        raise RuntimeError("CUDA error: device-side assert triggered")


class FullDisk(PlainEngine):
    def prefill(self, tokens: Tensor, images: Sequence[Path] = ()) -> HiddenStates:
        raise OSError(28, "No space left on device")


class BrokenKernel(PlainEngine):
    """A library's ValueError looks like a refused input and is none."""

    def prefill(self, tokens: Tensor, images: Sequence[Path] = ()) -> HiddenStates:
        raise ValueError("operands could not be broadcast together")


class NotFinite(PlainEngine):
    """Every prefill overflows, the canary's too."""

    def prefill(self, tokens: Tensor, images: Sequence[Path] = ()) -> HiddenStates:
        hidden = super().prefill(tokens, images)
        return HiddenStates(hidden.aux, torch.full_like(hidden.last, float("nan")))


class BadSample(PlainEngine):
    """Sound, and the first sample of the epoch overflows in it."""

    def __init__(self, run: PreparedRun, bad: int):
        super().__init__(run)
        self.bad = run.open_samples()[bad].tokens
        self.canaries = 0

    def prefill(self, tokens: Tensor, images: Sequence[Path] = ()) -> HiddenStates:
        hidden = super().prefill(tokens, images)
        if torch.equal(tokens, self.bad):
            hidden.last[0, 0] = float("inf")
        return hidden

    def check_canary(self, tokens: Tensor, images: Sequence[Path] = ()) -> None:
        self.canaries += 1
        super().check_canary(tokens, images)


@contextmanager
def running(run: PreparedRun, engine: PlainEngine, owner: str) -> Iterator[Callable[[float], int]]:
    """A generator in a thread; the result of its `run`, within a timeout in seconds."""
    generator = Generator(run, engine, owner)
    generator.take_over()
    with ThreadPoolExecutor(1) as thread:
        try:
            ended = thread.submit(generator.run)
            yield ended.result
        finally:
            generator.stopping = True


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


def wait_for(ledger: Ledger, expected: SampleProgress) -> None:
    wait_until(lambda: ledger.progress().model_copy(update={"bytes_held": 0}) == expected)


@pytest.mark.parametrize(
    ("kind", "lives", "error", "message"),
    [
        (LostDevice, 6, RuntimeError, "CUDA error"),
        (FullDisk, 1, OSError, "No space left"),
        (BrokenKernel, 1, ValueError, "broadcast"),
        (NotFinite, 1, EngineError, r"the canary fails too.*not finite"),
    ],
)
def test_a_broken_engine_beside_a_healthy_one_costs_no_sample(
    run: PreparedRun, kind: type[PlainEngine], lives: int, error: type[Exception], message: str
) -> None:
    """Once as often as a flow starts it again: it ends, and the healthy one captures what it gave back."""
    with run.open_ledger() as ledger:
        for _ in range(lives):
            with running(run, kind(run), "generator-0") as result, pytest.raises(error, match=message):
                result(300)
            assert ledger.progress() == SampleProgress(pending=12)
        with running(run, PlainEngine(run), "generator-1"):
            wait_for(ledger, SampleProgress(ready=12))


def first_sample(run: PreparedRun) -> int:
    return run.epoch_slots(0)[0].sample


def test_a_lone_generator_quarantines_a_sample_after_two_attempts_with_a_passing_canary_each(run: PreparedRun) -> None:
    engine = BadSample(run, first_sample(run))
    with run.open_ledger() as ledger:
        with running(run, engine, "generator-0"):
            wait_for(ledger, SampleProgress(ready=11, quarantined=1, attempts=2))
        assert engine.canaries == 2
        (bad,) = ledger.quarantined()
        assert (bad.sample, bad.error) == (
            first_sample(run),
            "last has values that are not finite; try generator.compute_dtype=float32",
        )


def test_a_sample_that_failed_in_one_generator_is_captured_by_another(make_run: MakeRun) -> None:
    """The first passes its canary and overflows on this sample alone: it may not try it again and condemn it."""
    # Until the lease would have expired, the sample is left to the others.
    run = opened(make_run("run", *SMALL, "generator.count=2", "ledger.lease_seconds=3600"))
    with run.open_ledger() as ledger:
        with running(run, BadSample(run, first_sample(run)), "generator-0"):
            # Of its first eight leases. It asks for no more while the lowest sample is one that others are to try.
            wait_for(ledger, SampleProgress(pending=5, ready=7, attempts=1))
            with running(run, PlainEngine(run), "generator-1"):
                wait_for(ledger, SampleProgress(ready=12, attempts=1))


def test_captures_that_ended_together_are_published_at_once_whatever_happened_to_another(run: PreparedRun) -> None:
    generator, commits = Generator(run, PlainEngine(run), "generator-0"), list[object]()
    leases = generator.ledger.lease("generator-0", 4)
    generator.ledger.fail(leases[1], "this lease is lost")
    broken: Future[Captured] = Future()
    broken.set_exception(RuntimeError("CUDA error"))
    with ThreadPoolExecutor(1) as thread:
        captures = [thread.submit(generator._capture, lease) for lease in leases[1:]]
    generator._flying = {future: (lease, 0.0) for future, lease in zip([broken, *captures], leases, strict=True)}
    event.listen(generator.ledger._engine, "commit", commits.append)
    generator.stopping = True  # or it leases samples in the same transaction
    with pytest.raises(RuntimeError, match="CUDA error"), ThreadPoolExecutor(1) as thread:
        generator._collect(thread)
    assert len(commits) == 1
    assert (generator.ledger.progress().leased, generator.ledger.progress().ready) == (1, 2)
    assert set(generator.transport.keys()) == {generator.ledger.key(lease) for lease in leases[2:]}


def test_texts_that_the_generator_at_them_has_left_are_made_by_another(make_run: MakeRun) -> None:
    """It was lost after the others had begun, and does not come back."""
    settings = ("training.heldout_steps=1", "training.heldout_prompts=2", "ledger.lease_seconds=1")
    run = opened(make_run("run", *SMALL, *settings))
    path = run.folder.heldout
    with ExitStack() as others, run.open_ledger() as ledger:
        others.enter_context(hold(path.with_name(f".{path.name}.lock")))
        with running(run, PlainEngine(run), "generator-1"):
            wait_for(ledger, SampleProgress(ready=12))
            assert not path.exists()
            others.close()
            wait_until(path.exists)
    assert read_heldout(path)


def test_any_generator_leaves_what_trainer_and_export_read(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one's device may be broken, and then it is never ready."""
    folder = make_run("run", *SMALL, "training.heldout_steps=1", "training.heldout_prompts=2", "generator.count=2")
    run = opened(folder)
    with run.open_ledger() as ledger, ledger.write() as (rows, _):
        rows.update_run(finished=True)
    monkeypatch.setattr("sys.argv", ["generator", str(folder.path), "--index", "1"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "generator 1 ready" in capsys.readouterr().out
    assert CapturePrecision.read(folder.precision) == PlainEngine(run).precision()
    assert read_heldout(folder.heldout)
