"""Training on what SGLang servers stream: as from memory, with two servers, and whatever happens to a server."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.ledger.schema import samples
from infra.records.data_path import SampleProgress
from models.config.recipe import RunConfig
from models.run import PreparedRun

pytestmark = pytest.mark.slow
SMALL = (
    "generator.engine=sglang",
    "data.max_samples=36",
    "data.max_tokens=96",
    "training.samples_per_step=4",
    "training.log_steps=1",
    "training.warmup_steps=4",
)


BLAMED = {
    "hung": "sglang-0 did not answer a prompt of .* tokens within 10 s",
    "hook raising": "capture in SGLang failed: RuntimeError: broken on purpose",
}
"""What the generator says; of a server that ended, its name."""


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The loss curve with the plain engine, once."""
    return {}


@pytest.fixture
def expected(
    plain: dict[str, list[float]],
    make_run: Callable[..., RunFolder],
    run_to_the_end: Callable[[RunFolder], None],
) -> list[float]:
    if not plain:
        folder = make_run("plain", *SMALL, "generator.engine=transformers")
        run_to_the_end(folder)
        plain["losses"] = losses(folder)
    return plain["losses"]


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """Whatever holds the run's name in its command line or its logs open: generators, trainers, servers."""
    found = []
    for one in psutil.process_iter():
        try:
            if str(folder.path) in " ".join([*one.cmdline(), os.readlink(f"/proc/{one.pid}/fd/1")]):
                found.append(one)
        except (OSError, psutil.Error):
            continue
    return found


def assert_trained_once(folder: RunFolder, expected: list[float], assert_no_segments_left: Callable[[], None]) -> None:
    run = PreparedRun.open(folder.path)
    progress = run.open_ledger().progress()
    assert progress == SampleProgress(consumed=36, attempts=progress.attempts)
    assert losses(folder) == pytest.approx(expected, rel=1e-4)
    assert not list(run.open_transport().keys())
    assert not processes_of(folder)
    assert not list(folder.logs.glob("*.leftovers"))
    assert_no_segments_left()


@pytest.mark.long
def test_servers_join_and_leave_a_run(
    make_run: Callable[..., RunFolder],
    start: Callable[..., Any],
    hold_back: Callable[..., Any],
    expected: list[float],
    assert_no_segments_left: Callable[[], None],
) -> None:
    """One server leaves when both have captured something, or when it alone has captured all that was to be had."""
    settings = ("generator.lease_samples=2", "transport.budget_mib=6", "ledger.lease_seconds=3600")
    folder = make_run("two", *SMALL, "generator.count=2", *settings)
    generators = [start("models.capture.generator", folder, index=index) for index in range(2)]
    for generator in generators:
        assert any("ready after" in line for line in generator.stdout)
    with hold_back(folder, range(18, 36)) as (ledger, release):
        trainer = start("models.training.launch", folder, ranks=1)
        assert wait_until(lambda: ledger.capture_rates().generators == 2 or first_owner(ledger, range(18)), 300)
        leaving = generators[int((first_owner(ledger, range(18)) or "generator-0")[-1])]
        leaving.terminate()
        leaving.wait(timeout=300)
        release()
        end_well(*generators, trainer)
        assert ledger.capture_rates().generators == 2
    assert_trained_once(folder, expected, assert_no_segments_left)


def first_owner(ledger: Ledger, ordinals: range) -> str | None:
    """Who captured the first of these samples, once all of them are captured."""
    captured = (samples.c.published.is_not(None), samples.c.ordinal.in_(list(ordinals)))
    with ledger.read() as rows:
        owners = rows.all(rows.select(samples.c.owner).where(*captured).order_by(samples.c.ordinal))
    return owners[0].owner if len(owners) == len(ordinals) else None


def end_well(*processes: Any) -> list[str]:
    """What they said. One that ends badly leaves the others waiting for ever: it is what has to be read."""
    deadline = time.monotonic() + 600
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert set(codes) == {0}, list(zip(codes, said, strict=True))
    return said


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(("killed before the reply", "hung"), id="killed, hung"),
        pytest.param(("killed in prefill", "writer ended", "hook raising"), id="others", marks=pytest.mark.long),
    ],
)
def test_whatever_happens_to_a_server_no_sample_is_lost_or_doubled(
    faults: tuple[str, ...],
    make_run: Callable[..., RunFolder],
    start: Callable[..., Any],
    expected: list[float],
    assert_no_segments_left: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One run: a killed generator, and servers that fail in other ways. No sample is blamed for any of it."""
    # Few requests at a time, or one server could have captured all before the fault, which is at its fifth prefill.
    folder = make_run("faulty", *SMALL, "generator.sglang.requests_in_flight=4")
    kill_generator(start("models.capture.generator", folder), folder)
    trainer, config = start("models.training.launch", folder, ranks=1), PreparedRun.open(folder.path).config
    for fault in faults:
        # A server that hangs is soon given up; a sound one may take longer to answer on a busy machine.
        write_atomically(folder.config, impatient(config) if fault == "hung" else config)
        monkeypatch.setenv("DRAFTSMITH_TEST_FAULT", f"{fault}:5:{tmp_path / fault}")
        assert_server_blamed(start("models.capture.generator", folder), BLAMED.get(fault, "sglang-0"))
    monkeypatch.delenv("DRAFTSMITH_TEST_FAULT")
    write_atomically(folder.config, config)
    end_well(trainer, start("models.capture.generator", folder))
    assert PreparedRun.open(folder.path).open_ledger().progress().attempts == 0
    assert_trained_once(folder, expected, assert_no_segments_left)


def impatient(config: RunConfig) -> RunConfig:
    sglang = config.generator.sglang.model_copy(update={"request_timeout_s": 10.0})
    return config.model_copy(update={"generator": config.generator.model_copy(update={"sglang": sglang})})


def kill_generator(generator: Any, folder: RunFolder) -> None:
    """Its server's supervisor takes the server along; its successor removes what SGLang left in shared memory."""
    assert next(line for line in generator.stdout if "ready after" in line)
    generator.kill()
    generator.communicate(timeout=60)
    assert wait_until(lambda: not processes_of(folder), 120)


def assert_server_blamed(generator: Any, message: str) -> None:
    output, _ = generator.communicate(timeout=400)
    assert generator.returncode == 1, output
    said = [line for line in output.splitlines() if line.startswith("models.capture.engine.EngineError")]
    assert len(said) == 1, output
    assert re.search(message, said[0]), said
