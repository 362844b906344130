"""The whole loop through the command line, killed in the middle and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from infra.mooncake.environment import check_mooncake
from infra.records import TargetRecord
from infra.tracking.registry import list_drafts
from infra.tracking.runs import TrackedRun

ROOT = Path(__file__).parents[2]
STEPS = 60
SAMPLES_PER_STEP = 8
SMALL = [
    f"training.max_steps={STEPS}",
    f"training.samples_per_step={SAMPLES_PER_STEP}",
    "training.checkpoint_steps=6",
    "training.log_steps=2",
    "benchmark.prompts=8",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=64",
    "benchmark.timed_tokens=16",
]
COMMAND = [sys.executable, "-c", "from flows.command_line import main; main()", "retrain"]
WAIT_S = 400.0


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, "ended early"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "shm").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | {
        "DRAFTSMITH_RUNS": str(tmp_path / "runs"),
        "DRAFTSMITH_SHM": str(tmp_path / "shm"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
    }


@pytest.fixture
def strike(tmp_path: Path, environment: dict[str, str]) -> Callable[..., int]:
    """Runs the command until the run has trained `step` steps, sends it a signal, and returns its exit status.

    Everything that it had started, Prefect's server included, must be gone soon afterwards.
    """

    def run(step: int, number: int, *arguments: str) -> int:
        with (tmp_path / f"{number}.txt").open("w") as output:
            process = subprocess.Popen(
                [*COMMAND, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
            )
        until(lambda: trained(tmp_path / "runs") >= step, process)
        children = psutil.Process(process.pid).children(recursive=True)
        named = [" ".join(child.cmdline()) for child in children]
        assert any("models.training.trainer" in command for command in named)
        assert any("prefect" in command for command in named)
        process.send_signal(number)
        status = process.wait(60)
        deadline = time.monotonic() + 60
        while any(alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [child.cmdline() for child in children if alive(child)]
        assert list((tmp_path / "shm").iterdir()) == []
        return status

    return run


def trained(runs: Path) -> int:
    lines = [line for file in runs.glob("tiny-*/metrics.jsonl") for line in file.read_text().splitlines()]
    return json.loads(lines[-1])["step"] if lines else 0


def mlflow_status(folder: Path) -> str:
    tracking = TrackedRun.read(folder / "tracking.json")
    return MlflowClient(tracking.uri).get_run(tracking.run_id).info.status


def widest_transport() -> str:
    """The one with most processes of its own, where it runs."""
    try:
        check_mooncake()
    except ValueError:
        return "auto"
    return "mooncake"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_interrupted_and_killed_run_resumes_and_loses_nothing(
    tmp_path: Path, environment: dict[str, str], strike: Callable[..., int], tiny_target: TargetRecord
) -> None:
    assert strike(8, signal.SIGINT, "recipes/tiny.yaml", *SMALL, f"transport.kind={widest_transport()}") == 130
    (folder,) = (tmp_path / "runs").glob("tiny-*")
    assert mlflow_status(folder) == "KILLED"
    assert strike(24, signal.SIGTERM, "--resume", folder.name) == -signal.SIGTERM
    assert mlflow_status(folder) == "KILLED"
    assert strike(40, signal.SIGKILL, "--resume", folder.name) == -signal.SIGKILL

    second = subprocess.run(
        [*COMMAND, "--resume", folder.name],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert second.returncode == 0, second.stderr[-4000:]
    assert second.stdout.splitlines()[-1] == str(folder)
    assert list((tmp_path / "shm").iterdir()) == []
    assert mlflow_status(folder) == "FINISHED"

    report = json.loads((folder / "report.json").read_text())
    assert report["train"]["steps"] == STEPS
    assert report["samples"]["consumed"] == STEPS * SAMPLES_PER_STEP
    assert report["samples"]["quarantined"] == 0
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(2, STEPS + 1, 2))
    tracking = TrackedRun.read(folder / "tracking.json")
    logged = MlflowClient(tracking.uri).get_metric_history(tracking.run_id, "loss")
    assert sorted(point.step for point in logged) == steps
    (draft,) = list_drafts(tracking.uri)
    assert (draft.name, draft.version) == ("draft-tiny", report["draft"]["version"])
