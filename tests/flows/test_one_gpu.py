"""The whole flow on a machine with one GPU, which is a lock and a name: both ways of sharing it, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.records.data_path import TargetRecord
from infra.records.sharing import read_sharing

ROOT = Path(__file__).parents[2]
STEPS, SAMPLES_PER_STEP = 24, 4
RECIPE = [
    *("recipes/tiny.yaml", "pools.inference_gpus=1", "pools.training_gpus=1", "data.max_samples=96"),
    *(f"training.samples_per_step={SAMPLES_PER_STEP}", "training.checkpoint_steps=6", "training.log_steps=1"),
    *("benchmark.prompts=8", "benchmark.max_new_tokens=16", "benchmark.reference_tokens=64"),
    *("benchmark.timed_tokens=16", "promotion.smoke_prompts=2"),
]
COMMAND = [sys.executable, "-c", "from flows.command_line import main; main()"]
WAIT_S = 600.0


@pytest.fixture
def environment(tmp_path: Path, tiny_target: TargetRecord) -> dict[str, str]:
    (tmp_path / "shm").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | {
        "DRAFTSMITH_RUNS": str(tmp_path / "runs"),
        "DRAFTSMITH_SHM": str(tmp_path / "shm"),
        "DRAFTSMITH_GPUS": f"GPU-fake-{tmp_path.name}",
        "PREFECT_HOME": str(tmp_path / "prefect"),
    }


@pytest.fixture
def draftsmith(tmp_path: Path, environment: dict[str, str]) -> Callable[..., "subprocess.Popen[bytes]"]:
    def start(*arguments: str) -> "subprocess.Popen[bytes]":
        with (tmp_path / "output.txt").open("a") as output:
            return subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=output)

    return start


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def written(folder: Path, pattern: str, flow: "subprocess.Popen[bytes]") -> Path:
    """A file of a run, once the flow has written it."""
    deadline = time.monotonic() + WAIT_S
    while not (found := list((folder / "runs").glob(pattern))):
        assert flow.poll() is None, (folder / "output.txt").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_turns_on_one_gpu_are_killed_resumed_and_train_what_sharing_it_trains(
    tmp_path: Path, environment: dict[str, str], draftsmith: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    flow = draftsmith("retrain", *RECIPE)
    shared = RunFolder(written(tmp_path, "tiny-*/training.json", flow).parent)
    flow.send_signal(signal.SIGINT)  # what follows the training is not compared
    assert flow.wait(WAIT_S) != 0
    assert read_sharing(shared).mode == "share"  # the planner's choice: a tiny target and its draft fit together

    turns = ["name=turns", "pools.sharing=alternate", "transport.round_mib=32"]
    flow = draftsmith("retrain", *RECIPE, *turns)
    folder = RunFolder(written(tmp_path, "turns-*/metrics.jsonl", flow).parent)
    flow.send_signal(signal.SIGKILL)
    flow.wait(WAIT_S)
    # What is captured outlives the flow; training may have taken all of it before the flow was killed.
    with hold(folder.processes_lock, wait_s=300), Ledger.open(folder.ledger_url, folder.name) as ledger:
        assert len(list((folder.path / "objects").iterdir())) >= ledger.progress().ready
    assert draftsmith("retrain", "--resume", folder.name).wait(WAIT_S) == 0
    said = (tmp_path / "output.txt").read_text()
    assert "capture: the generators' turn" in said
    assert "generators and trainer: alternate (the recipe's choice (pools.sharing))" in said
    assert not list((folder.path / "objects").iterdir())
    assert losses(folder) == losses(shared)
    assert len(losses(folder)) == STEPS
    report = json.loads(folder.report.read_text())
    assert report["samples"]["consumed"] == STEPS * SAMPLES_PER_STEP

    status = [*COMMAND, "status", folder.name]
    shown = subprocess.run(status, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "turn" in shown.stdout
