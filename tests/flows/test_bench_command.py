"""`draftsmith bench` leases GPUs as runs do."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from flows import bench_command
from flows.command_line import app
from infra.pools.base import PoolBusyError, PoolSpec
from infra.pools.gpus import Gpus
from infra.pools.local import LocalPools
from infra.processes.process import Owner
from infra.refusal import Refusal
from models.benchmark import standalone

GPUS = ("GPU-aa", "GPU-bb")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalPools:
    """A machine with two idle GPUs, as another run sees it."""
    locks = tmp_path / "locks"
    monkeypatch.setattr("infra.pools.local._foreign", lambda _gpus: {})
    monkeypatch.setattr(bench_command, "LocalPools", lambda: LocalPools(GPUS, locks))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return LocalPools(GPUS, locks)


def bench() -> int:
    arguments = ["bench", "--target", "t", "--draft", "d", "--suite", "gsm8k"]
    return CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code


@pytest.mark.parametrize(
    ("named", "seen"), [(None, "GPU-aa"), ("1,0", "GPU-aa,GPU-bb"), ("GPU-aa", "GPU-aa"), ("", ""), ("-1", "")]
)
def test_a_bench_holds_the_gpus_that_it_computes_on(
    machine: LocalPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, seen: str
) -> None:
    def measure(_command: list[str], *, env: dict[str, str], **_options: Any) -> SimpleNamespace:
        assert env["CUDA_VISIBLE_DEVICES"] == seen
        wanted = len(GPUS) - len([gpu for gpu in seen.split(",") if gpu])
        machine.acquire([PoolSpec("training", wanted)], Owner("other", tmp_path))
        machine.release("other")
        if seen:
            with pytest.raises(PoolBusyError):
                machine.acquire([PoolSpec("training", len(GPUS))], Owner("other", tmp_path))
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(subprocess, "run", measure)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert bench() == 7
    machine.acquire([PoolSpec("training", len(GPUS))], Owner("other", tmp_path))
    machine.release("other")


def test_a_bench_takes_no_gpu_that_a_run_holds(machine: LocalPools, tmp_path: Path) -> None:
    machine.acquire([PoolSpec("training", len(GPUS))], Owner("run", tmp_path))
    with pytest.raises(Refusal, match=r"2 are held by other runs or followers now; .* CPU \(CUDA_VISIBLE_DEVICES=\)"):
        bench()
    machine.release("run")


def test_a_bench_does_not_move_to_the_cpu_where_no_gpu_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Gpus((), "580.1", 13, {0: "GPU is lost"})
    monkeypatch.setattr("infra.pools.local.read_gpus", lambda: lost)
    monkeypatch.setattr(bench_command, "LocalPools", lambda: LocalPools((), tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=7))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        Refusal, match=r"has 0 GPUs; GPU 0 does not answer \(GPU is lost\): .* CPU \(CUDA_VISIBLE_DEVICES=\)"
    ):
        bench()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bench() == 7


def test_a_registry_that_is_away_is_said_before_anything_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    arguments = ["bench", "--target", "t", "--draft", "d", "--suite", "gsm8k", "--champion-of", "draft-x"]
    with pytest.raises(Refusal, match=r"http://127\.0\.0\.1:9"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize("option", ["--json", "--page"])
@pytest.mark.parametrize("place", [".", "file/results"])
def test_figures_that_nothing_could_hold_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, place: str
) -> None:
    (tmp_path / "file").touch()
    arguments = ["bench", "--target", "t", "--draft", "d", "--suite", "gsm8k", option, str(tmp_path / place)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(Refusal, match="cannot be written: give --json and --page a file"):
        standalone.main()
