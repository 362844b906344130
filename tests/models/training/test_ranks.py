"""Several ranks, accumulation, and another number of ranks after a resume: the same training. Real processes, gloo."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.files.run_folder import RunFolder
from infra.records.data_path import HELDOUT_LENGTH, SampleProgress, TrainingResult
from models.config.recipe import with_overrides
from models.run import PreparedRun
from models.training import control

# 43 samples: no number of ranks or micro-batches divides the last step.
SMALL = [
    "data.max_samples=43",
    "data.max_tokens=64",
    "training.samples_per_step=6",
    "training.log_steps=1",
    "training.warmup_steps=4",
]


@pytest.fixture
def train(make_run: Callable[..., RunFolder], start: Callable[..., Any]) -> Callable[..., RunFolder]:
    """Trains a run to its end on some ranks: `train("name", 2, "training.micro_batches=4")`."""

    def run(name: str | RunFolder, ranks: int, *overrides: str) -> RunFolder:
        folder = name if isinstance(name, RunFolder) else make_run(name, *SMALL, f"training.ranks={ranks}", *overrides)
        processes = [start("models.capture.generator", folder), start("models.training.launch", folder, ranks=ranks)]
        for process in reversed(processes):
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output
        return folder

    return run


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def acceptance(folder: RunFolder) -> list[list[float]]:
    return [json.loads(line)["acceptance_by_position"] for line in folder.metrics.read_text().splitlines()]


def heldout_length(folder: RunFolder) -> float:
    return json.loads(folder.metrics.read_text().splitlines()[-1])[HELDOUT_LENGTH]


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    checkpoint = folder.path / TrainingResult.read(folder.training).checkpoint
    return load_file(checkpoint / "draft.safetensors")


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a tensor: |a - b| / |b|."""
    assert mine.keys() == theirs.keys()
    pairs = [(mine[name].double(), theirs[name].double()) for name in theirs]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


MEASURED = "training.heldout_steps=4"
ACCUMULATION = [(1, "training.micro_batches=4")]
THREE = [(3, "training.micro_batches=4")]
RANKS = [
    # FSDP2 with accumulation; the last step leaves ranks without a sample. Without accumulation, two and three ranks:
    # `test_a_run_goes_on_with_another_number_of_ranks`.
    (2, "training.micro_batches=4", "training.sharded=true"),
    # Two pairs of ranks, each of which shares its samples; the draft is divided among all four.
    (4, "training.context_parallel_size=2", "training.micro_batches=2", "training.sharded=true"),
]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "cases",
    [RANKS, *(pytest.param(cases, marks=pytest.mark.long) for cases in (THREE, ACCUMULATION))],
    ids=["ranks", "three ranks", "one rank"],
)
def test_ranks_and_accumulation_change_nothing(
    train: Callable[..., RunFolder], finished_run: Callable[..., RunFolder], cases: list[tuple[Any, ...]]
) -> None:
    alone = finished_run(*SMALL, MEASURED)
    assert len(losses(alone)) == 8
    for number, (ranks, *settings) in enumerate(cases):
        folder = train(f"setting-{number}", ranks, MEASURED, *settings)
        assert losses(folder) == pytest.approx(losses(alone), rel=1e-5), (ranks, settings)
        assert acceptance(folder) == acceptance(alone), (ranks, settings)
        assert heldout_length(folder) == pytest.approx(heldout_length(alone), rel=1e-5), (ranks, settings)
        assert distance(weights(folder), weights(alone)) < 1e-5, (ranks, settings)
        run = PreparedRun.open(folder.path)
        assert run.open_ledger().progress() == SampleProgress(consumed=43)
        assert not list(run.open_transport().keys())


@pytest.mark.slow
def test_muon_orthogonalises_whole_matrices_of_a_divided_draft(
    train: Callable[..., RunFolder], finished_run: Callable[..., RunFolder]
) -> None:
    muon = ("training.optimizer=muon", "training.max_steps=4")
    alone, divided = finished_run(*SMALL, *muon), train("divided", 2, *muon, "training.sharded=true")
    assert losses(divided) == pytest.approx(losses(alone), rel=1e-4)
    assert distance(weights(divided), weights(alone)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharded", "ranks", "size"), [("false", 3, 1), pytest.param("true", 4, 2, marks=pytest.mark.long)]
)
def test_a_run_goes_on_with_another_number_of_ranks(
    train: Callable[..., RunFolder],
    finished_run: Callable[..., RunFolder],
    make_run: Callable[..., RunFolder],
    kill_at_checkpoint: Callable[..., None],
    hold_back: Callable[..., Any],
    sharded: str,
    ranks: int,
    size: int,
) -> None:
    """From two ranks to three; from two that divide the draft to four of which two share a sample each."""
    undisturbed = finished_run(*SMALL, MEASURED)
    kept = ("training.checkpoint_steps=1", "training.keep_checkpoints=9", f"training.sharded={sharded}")
    folder = make_run("moved", *SMALL, "training.ranks=2", *kept, "ledger.lease_seconds=3600")
    with hold_back(folder, range(30, 43)):
        kill_at_checkpoint(folder, 3, ranks=2)
    run = PreparedRun.open(folder.path)
    before = run.open_ledger().progress()
    assert 0 < before.consumed < 43, "killed too late"
    placement = [f"training.ranks={ranks}", f"training.context_parallel_size={size}"]
    folder.config.write_text(with_overrides(run.config, placement).model_dump_json())
    train(folder, ranks)
    assert run.open_ledger().progress() == SampleProgress(consumed=43)
    assert losses(folder) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert distance(weights(folder), weights(undisturbed)) < 1e-5


@pytest.mark.slow
def test_what_aborts_while_the_interpreter_ends_does_not_undo_a_training(
    make_run: Callable[..., RunFolder], start: Callable[..., Any]
) -> None:
    """As a thread of gloo does that still holds a tensor."""
    folder = make_run("ended", *SMALL, "training.ranks=2", "training.max_steps=2")
    generator = start("models.capture.generator", folder)
    run_on_ranks(2, "aborting_trainer.py", folder.path)
    generator.communicate(timeout=600)
    assert TrainingResult.read(folder.training).steps == 2


def run_on_ranks(ranks: int, script: str, *arguments: object) -> None:
    """Run a script of this folder once per rank."""
    launch = f"import sys; from models.training.launch import run_ranks; sys.exit(run_ranks(sys.argv[1:], {ranks}))"
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    ended = subprocess.run(
        [sys.executable, "-c", launch, *command],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_accumulation_reduces_gradients_once_per_step(
    make_run: Callable[..., RunFolder], start: Callable[..., Any], tmp_path: Path
) -> None:
    folder = make_run("counted", *SMALL, "training.ranks=2", "training.micro_batches=3", "training.max_steps=5")
    generator = start("models.capture.generator", folder)
    run_on_ranks(2, "counting_trainer.py", folder.path, tmp_path / "reduced")
    generator.communicate(timeout=600)
    # One bucket holds all gradients, but for the first step, before DDP has put it together anew.
    assert int((tmp_path / "reduced").read_text()) in {5, 6}


def test_ranks_wait_for_each_other_as_long_as_one_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []
    monkeypatch.setattr(control, "rank_from_environment", lambda: (0, 2, 0, 2))
    monkeypatch.setattr(control, "ranks_store", lambda: "/nowhere")
    monkeypatch.setattr(control.dist, "init_process_group", lambda *_, timeout, **__: waits.append(timeout))
    monkeypatch.setattr(control, "_own_subgroup", lambda _size, _backend, wait: waits.append(wait))
    control.Control(2, wait_s=5400.0)
    assert waits == [timedelta(seconds=5400)] * 5
