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

from infra.records import TargetRecord
from infra.tracking.registry import list_drafts
from infra.tracking.runs import TrackedRun

ROOT = Path(__file__).parents[2]
STEPS = 24
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
        time.sleep(0.2)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_and_loses_nothing(tmp_path: Path, tiny_target: TargetRecord) -> None:
    environment = {
        **os.environ,
        "DRAFTSMITH_RUNS": str(tmp_path / "runs"),
        "DRAFTSMITH_SHM": str(tmp_path / "shm"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
    }
    environment.pop("MLFLOW_TRACKING_URI", None)
    (tmp_path / "shm").mkdir()
    with (tmp_path / "first.txt").open("w") as output:
        first = subprocess.Popen(
            [*COMMAND, "recipes/tiny.yaml", *SMALL], cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
        )
    until(lambda: list((tmp_path / "runs").glob("tiny-*/checkpoints/step-000006/manifest.json")), first)
    (folder,) = (tmp_path / "runs").glob("tiny-*")
    until(lambda: len((folder / "metrics.jsonl").read_text().splitlines()) > 3, first)
    children = psutil.Process(first.pid).children(recursive=True)
    commands = {child: " ".join(child.cmdline()) for child in children}
    assert any("models.training.trainer" in command for command in commands.values())
    os.kill(first.pid, signal.SIGKILL)
    first.wait(30)
    for child, command in commands.items():
        if "prefect.server" in command:
            child.kill()  # Prefect's own temporary server outlives a killed flow

    # At once: the resumed run waits until the killed one's processes are gone.
    second = subprocess.run(
        [*COMMAND, "--resume", folder.name],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert second.returncode == 0, second.stderr[-4000:]
    assert second.stdout.splitlines()[-1] == str(folder)
    assert not [command for child, command in commands.items() if alive(child)]
    assert list((tmp_path / "shm").iterdir()) == []

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
