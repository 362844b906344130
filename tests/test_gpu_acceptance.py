"""The GPU acceptance without a GPU: its runner, its refusal, and every stage's code with tiny shapes on the CPU."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from emulated_device import NAME, emulated_device

from infra.pools.base import PoolBusyError, PoolSpec
from infra.pools.local import LocalPools
from infra.processes.process import Owner
from infra.refusal import Refusal

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_acceptance.py"
GPUS = ("GPU-aa", "GPU-bb")
LEAVES_A_CHILD = ["sh", "-c", "sleep 600 & echo $!; wait"]

FIRST = [("attention", "losses", "experts", "lengths", "copies"), ("training", "served")]
OTHERS = [("capture", "tensor"), ("share", "alternate", "mooncake"), ("ddp", "fsdp2", "context")]


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("gpu_acceptance")


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("print('fine')", "passed", ""),
        ("print('first'); raise ValueError('too far apart')", "failed", "ValueError: too far apart"),
        ("print('no second GPU'); raise SystemExit(77)", "skipped", "no second GPU"),
        ("raise SystemExit(3)", "failed", "status 3"),
    ],
)
def test_what_comes_of_a_stage(acceptance, tmp_path: Path, code: str, status: str, reason: str) -> None:
    outcome = acceptance.run_stage([sys.executable, "-c", code], tmp_path / "log", (), 600.0)
    assert (outcome.status, outcome.reason) == (status, reason)


def test_a_stage_that_takes_too_long_is_killed_with_its_children(
    acceptance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    class Started(subprocess.Popen):
        """Its time begins when its child is there, however long that takes."""

        def wait(self, timeout: float | None = None) -> int:
            deadline = time.monotonic() + 300
            while not log.read_text().endswith("\n"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(acceptance.subprocess, "Popen", Started)
    outcome = acceptance.run_stage(LEAVES_A_CHILD, log, (), 1.0)
    child = int(log.read_text().split()[0])
    assert (outcome.status, outcome.reason) == ("failed", f"not done after 1 s: {child}")
    deadline = time.monotonic() + 300  # less than the child sleeps
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def gpus(acceptance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalPools:
    """A machine with two idle GPUs, as a run sees it."""
    monkeypatch.setattr("infra.pools.local._foreign", lambda _gpus: {})
    monkeypatch.setattr(acceptance, "LocalPools", lambda: LocalPools(GPUS, tmp_path / "locks"))
    return LocalPools(GPUS, tmp_path / "locks")


def test_the_acceptance_takes_no_gpu_that_a_run_holds(acceptance, gpus: LocalPools, tmp_path: Path) -> None:
    (held,) = gpus.acquire([PoolSpec("training", 1)], Owner("run", tmp_path))
    with acceptance.leased(2, tmp_path) as pool:
        assert {*pool.gpus, *held.gpus} == set(GPUS)
        assert len(pool.gpus) == 1
    gpus.acquire([PoolSpec("training", 1)], Owner("another", tmp_path))
    with pytest.raises(Refusal, match=r"all GPUs .* in use .*2 are held by other runs or followers now.*: wait"):
        acceptance.accept(acceptance.STAGES, "cuda", tmp_path, 1.0, tmp_path / "result.json")


def test_the_acceptance_holds_its_gpus_except_for_the_runs_that_it_starts(
    acceptance, gpus: LocalPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, tuple[str, bool]] = {}

    class Stub(subprocess.Popen):
        """A stage that does nothing, beside a run that wants a GPU."""

        def __init__(self, command: list[str], **options: Any) -> None:
            if "--stage" not in command:
                super().__init__(command, **options)
                return
            try:
                gpus.acquire([PoolSpec("training", 1)], Owner("run", tmp_path))
                is_free = True
            except PoolBusyError:
                is_free = False
            gpus.release("run")
            seen[command[command.index("--stage") + 1]] = (options["env"]["CUDA_VISIBLE_DEVICES"], is_free)
            super().__init__(["true"], **options)

    monkeypatch.setattr(acceptance.subprocess, "Popen", Stub)
    chosen = [stage for stage in acceptance.STAGES if stage.name in ("doctor", "ddp", "share", "alternate")]
    acceptance.accept(chosen, "cuda", tmp_path, 1.0, tmp_path / "result.json")
    assert seen == {
        "doctor": ("GPU-aa", False), "ddp": ("GPU-aa,GPU-bb", False), "share": ("GPU-aa", True),
        "alternate": ("GPU-aa", True),
    }  # fmt: skip


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie that this container's init has not reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def accept(folder: Path, *options: str, **environment: str) -> tuple[int, str, dict]:
    """Exit status, output and JSON of the command."""
    result = folder / "gpu_acceptance.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(result), "--work", str(folder / "work"), *options],
        capture_output=True, text=True, timeout=1800, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, json.loads(result.read_text())


def test_without_a_gpu_it_says_what_is_missing_and_runs_no_other_stage(tmp_path: Path) -> None:
    status, output, found = accept(tmp_path, DRAFTSMITH_GPUS="GPU-of-nobody", CUDA_VISIBLE_DEVICES="")
    assert status == 1
    assert "finds no GPU that it can use. Doctor:" in output
    assert "Install NVIDIA's driver" in output
    first, *others = found["stages"].values()
    assert first["status"] == "failed"
    assert first["figures"]["doctor"]["GPUs"]["found"]
    assert others
    assert {(stage["status"], stage["reason"]) for stage in others} == {("skipped", "not run: doctor failed")}
    assert set(found["conditions"]) >= {"commit", "driver", "gpus", "versions"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["attention", "losses", "experts"])
def test_kernels_of_the_gpu_pass_on_the_emulated_one(acceptance, tmp_path: Path, stage: str) -> None:
    kernels, base = (importlib.import_module(f"gpu_stages.{name}") for name in ("kernels", "base"))
    bench = base.Bench(NAME, tmp_path, stage)
    with emulated_device():
        getattr(kernels, stage)(bench)
    assert json.loads(bench.file.read_text()).keys() == bench.figures.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages", [*FIRST, *(pytest.param(stages, marks=pytest.mark.long) for stages in OTHERS)], ids=",".join
)
def test_every_stage_runs_on_the_cpu(tmp_path: Path, stages: tuple[str, ...]) -> None:
    options = ("--device", "cpu", "--minutes", "60", "--only", ",".join(stages))
    status, output, found = accept(tmp_path, *options, SGLANG_PLATFORM="draftsmith_test_cpu")
    outcomes = {name: stage["status"] for name, stage in found["stages"].items()}
    logs = [Path(stage["log"]).read_text()[-3000:] for stage in found["stages"].values() if stage["status"] == "failed"]
    assert outcomes.keys() == {"doctor", *stages}
    # A CPU has no memory to divide, and Mooncake needs a library that a machine may lack.
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"}
    assert skipped <= {"share", "mooncake"}, output
    assert status == 0, (output, logs)


def test_no_stage_is_left_out(acceptance) -> None:
    assert {"doctor", *(stage for stages in FIRST + OTHERS for stage in stages)} == {
        stage.name for stage in acceptance.STAGES
    }
