"""`draftsmith status` over runs at every stage: what a person reads."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows import status_command
from flows.command_line import app
from flows.stack_command import _how_to_use
from infra.files.atomic import write_atomically
from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import plan_step, resume_run
from infra.quantities import figure
from infra.records.acceptance import RegisteredDraft
from infra.records.data_path import BufferRecord, CheckpointRecord, GeneratorsChange, ObjectRecord, SampleSlot
from infra.records.sharing import Sharing
from infra.refusal import Refusal
from infra.tracking import registry, runs
from models.config.recipe import read_config
from tasks.plan import plan_recipe


@pytest.fixture
def run(make_run: Callable[..., RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run on its way: of ten samples two are consumed, one taken, one ready, one leased, one quarantined."""
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path))
    folder = make_run("tiny-1", "data.max_samples=10", "training.samples_per_step=1", "ledger.max_attempts=1")
    with Ledger.open(folder.ledger_url, folder.name) as ledger:
        ledger.create_run(budget_bytes=2**26, bytes_per_token=1024, lease_seconds=60, max_attempts=1, order="strict")
        slots = [SampleSlot(ordinal=i, sample=i, tokens=8) for i in range(10)]
        taken = resume_run(ledger, lambda _: True, lambda _: True)
        ledger.open_epoch(taken.incarnation, 0, slots)
        for lease in ledger.lease("generator-0-77", 6):
            if lease.ordinal == 2:
                ledger.fail(lease, "ValueError: hidden states are not finite")
            elif lease.ordinal != 5:
                buffer = BufferRecord(name="aux", nbytes=lease.nbytes, xxh3="0")
                record = ObjectRecord(key=ledger.key(lease), location="nowhere", buffers=(buffer,))
                assert not ledger.publish(Publication(lease, record, prefill_s=0.5, put_s=0.01))
        for step in (1, 2, 3):
            plan_step(ledger, taken.incarnation, 0, step, ranks=1, micro_batches=1, samples_per_step=1)
        record = CheckpointRecord(step=2, path="checkpoints/step-000002-1", manifest_hash="x", incarnation=1)
        ledger.commit(taken.incarnation, record)
    return folder


def told(folder: RunFolder) -> str:
    result = CliRunner().invoke(app, ["status", str(folder.path)], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return re.sub(r"\s+", " ", result.output)


def write_metrics(folder: RunFolder, **rates: float | None) -> None:
    sides = {"inference": 900.0, "transport": 50_000.0, "training": 600.0, "data_wait_share": 0.01} | rates
    line = {
        "step": 2,
        "loss": 7.25,
        "seconds": 60.0,
        "tokens_per_s": 580.0,
        "acceptance_by_position": [0.5, 0.25],
        "rates": sides | {"generators": 1, "ranks": 1},
    }
    folder.metrics.write_text(json.dumps(line) + "\n")


def test_where_every_sample_is(run: RunFolder) -> None:
    text = told(run)
    assert "10: 2 consumed, 1 taken, 1 ready, 1 leased, 4 pending, 1 quarantined" in text
    assert "epoch 0 ordinal 2 (sample 2): ValueError: hidden states are not finite" in text
    assert "interrupted while training; resume it with: draftsmith retrain --resume tiny-1" in text
    assert "bottleneck" not in text
    assert "on their way" not in text, "nobody holds anything for a run that no process runs"


def test_a_path_is_whole_in_a_narrow_terminal(run: RunFolder, tmp_path: Path) -> None:
    folder = run.path.rename(tmp_path / f"tiny-{'x' * 90}")
    result = CliRunner().invoke(app, ["status", str(folder)], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert str(folder) in re.sub(r"\s+", "", result.output)


def test_after_training_nothing_is_on_its_way(run: RunFolder) -> None:
    run.training.write_text("{}")
    with hold(run.run_lock):
        text = told(run)
    assert "10: 2 consumed, 1 quarantined, 7 not reached" in text
    assert "on their way" not in text
    assert "▒" not in text


@pytest.mark.parametrize(
    ("outcomes", "shown"),
    [
        (("promoted", "rolled back"), "rolled back by somebody: slow"),
        (("promoted",), "does not serve any more"),
        ((), "does not serve"),
    ],
)
def test_a_draft_without_an_alias_says_what_was_decided(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Any, ...], shown: str
) -> None:
    draft = RegisteredDraft(name="draft-tiny", version=2, model_id="m", aliases=())
    decisions = [
        registry.PromotionDecision(at=1, version=2, outcome=one, champion_before=1, by="somebody", reason="slow")
        for one in outcomes
    ]
    monkeypatch.setattr(registry, "list_drafts", lambda *_: [draft])
    monkeypatch.setattr(registry, "history", lambda *_: decisions)
    runs.start_run(run.tracking, f"sqlite:///{run.path}/mlflow.db", "test", run.name, {}, {})
    assert status_command._alias(run, draft.name, 2) == shown


def test_what_serves_is_asked_of_the_run_s_own_mlflow(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/shell/mlflow.db")
    own = f"sqlite:///{run.path}/own.db"
    tracked = runs.start_run(run.tracking, own, "test", run.name, {}, {})
    registry.register(own, "draft-tiny", runs.log_folder(tracked, run.logs, "draft", 1, "draft"), tracked.run_id, {})
    assert status_command._alias(run, "draft-tiny", 1) == "challenger"
    (run.path / "own.db").unlink()
    assert status_command._alias(run, "draft-tiny", 1) == f"MLflow at {own} does not answer: what serves is not known"
    assert not (run.path / "own.db").exists()
    run.tracking.unlink()
    assert status_command._alias(run, "draft-tiny", 1).endswith("is missing or damaged: what serves is not known")
    assert not (tmp_path / "shell").exists()


def test_the_plan_is_held_against_what_is_measured(run: RunFolder) -> None:
    write_metrics(run)
    assert "plan, " not in told(run)
    plan = plan_recipe(read_config(run.config))
    run.plan.write_text(plan.model_dump_json())
    text = told(run)
    measured = f"{figure(900 / plan.job.mean_tokens)} samples/s measured, {figure(plan.present.inference)} planned"
    assert f"plan, inference {measured}" in text
    assert "plan, split no other one of 2 cores is better than 1 + 1" in text


def test_a_run_that_failed_says_why(run: RunFolder) -> None:
    run.failure.write_text("the shape is [/INST] and [red]not[/red]\n")
    text = told(run)
    assert "state failed while training; once the cause is gone, resume it with: draftsmith" in text
    assert "error the shape is [/INST] and [red]not[/red]" in text


def test_a_folder_with_a_space_in_its_name_is_one_argument(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "old runs").mkdir()
    moved = RunFolder(run.path.rename(tmp_path / "old runs" / run.name))
    assert f"draftsmith retrain --resume '{moved.path}'" in told(moved)
    assert _how_to_use(tmp_path / "my stack").endswith(f". '{tmp_path}/my stack/environment'")


def test_a_run_that_failed_says_why_without_its_ledger(run: RunFolder) -> None:
    run.failure.write_text("the ledger's disk is gone")
    run.ledger_file.write_bytes(b"\0" * 8192)
    text = told(run)
    assert "error the ledger's disk is gone" in text
    assert f"ledger the ledger {run.ledger_file} is damaged" in text


def test_a_run_that_moves(run: RunFolder) -> None:
    write_metrics(run)
    write_atomically(run.sharing, Sharing(mode="apart", why="", budget_bytes=64 * 2**20))
    with hold(run.run_lock):
        text = told(run)
    assert "state training samples" in text
    assert "of 64 MiB between capture and training" in text
    assert "step 2 of 10, loss 7.250, acceptance by position 0.50 0.25, 580 tokens/s, about 4 min 0 s left" in text
    assert "training is the slow side" in text
    assert "stalled" not in text


def test_a_run_is_watched_until_it_ends(run: RunFolder) -> None:
    write_metrics(run)
    command = [sys.executable, "-c", "from flows.command_line import main; main()", "status", str(run.path), "--watch"]
    terminal = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "200", "TERM": "xterm"}
    with hold(run.run_lock), subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=terminal) as watching:
        assert watching.stdout is not None
        try:
            while "training" not in watching.stdout.readline():
                assert watching.poll() is None
            run.run_lock.unlink()  # as if its holder were gone
            later, _ = watching.communicate(timeout=300)
        finally:
            watching.kill()
    assert watching.returncode == 0
    assert "interrupted while training; resume it with: draftsmith retrain --resume tiny-1" in later


@pytest.mark.parametrize(
    ("rates", "side"),
    [
        ({"data_wait_share": 0.4, "inference": 350.0}, "inference"),
        ({"data_wait_share": 0.4, "inference": 900.0, "transport": 300.0}, "transport"),
        ({"data_wait_share": 0.04, "inference": 350.0}, "training"),
        ({"data_wait_share": 0.9, "inference": None, "transport": None}, "inference"),
    ],
)
def test_the_slow_side_is_named(run: RunFolder, rates: dict[str, float | None], side: str) -> None:
    write_metrics(run, **rates)
    assert f"{side} is the slow side" in told(run)


def test_generators_that_came_and_went(run: RunFolder) -> None:
    assert "generators " not in told(run)
    changes = [
        GeneratorsChange(at=1.0 + n, generators=n, why=f"generator-{n} is added: inference is slow") for n in (1, 2)
    ]
    run.generators.write_text("".join(f"{change.model_dump_json()}\n" for change in changes))
    assert "generators 2; generator-2 is added: inference is slow" in told(run)
    config = json.loads(run.config.read_text())
    config["generator"]["max_count"] = 4
    run.config.write_text(json.dumps(config))
    assert "generators 2 of at most 4; generator-2 is added: inference is slow" in told(run)


def test_the_newest_run_is_meant_where_none_is_named(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    with pytest.raises(ValueError, match=r"no runs in .*: start one with"):
        CliRunner().invoke(app, ["status"], catch_exceptions=False)
    for age, name in ((60, "older"), (0, "newer")):
        shutil.copytree(run.path, tmp_path / "runs" / name)
        # Not just written one after the other: clocks of file systems tick every few milliseconds.
        written = run.config.stat().st_mtime - age
        os.utime(tmp_path / "runs" / name / "config.json", (written, written))
    assert "run newer" in re.sub(r"\s+", " ", CliRunner().invoke(app, ["status"]).output)
    with pytest.raises(ValueError, match=r"no run oldest: .*clean-up"):
        CliRunner().invoke(app, ["status", "oldest"], catch_exceptions=False)


def test_a_damaged_ledger_is_named(run: RunFolder) -> None:
    run.ledger_file.write_bytes(b"\0" * 8192)
    result = CliRunner().invoke(app, ["status", str(run.path)], env={"COLUMNS": "200"})
    assert isinstance(result.exception, Refusal), result.output
    assert str(run.ledger_file) in str(result.exception)


def test_a_file_of_another_version_hides_nothing_else(run: RunFolder) -> None:
    write_metrics(run)
    run.plan.write_text('{"of_another_version": 1}')
    text = told(run)
    assert "training is the slow side" in text
    assert f"plan not compared: {run.plan} is damaged, or of another version of Draftsmith" in text
    write_metrics(run, of_another_version=1.0)
    run.sharing.write_text("{}")
    text = told(run)
    assert "step 2 of 10" in text
    assert "bottleneck not shown: " in text
    assert f"on their way not shown: {run.sharing} is damaged" in text
    run.samples.unlink()
    text = told(run)
    assert "training not shown: [Errno 2] No such file or directory" in text
    assert "10: 2 consumed" in text


def test_a_finished_run_of_another_version_shows_what_can_be_read(run: RunFolder) -> None:
    for name in ("training.json", "export.json", "benchmark.json", "report.json"):
        (run.path / name).write_text("{}")
    text = told(run)
    assert "state finished" in text
    assert f"draft not shown: {run.benchmark} is damaged" in text
    assert "10: 2 consumed" in text


def test_a_run_that_was_removed_meanwhile_is_not_to_be_resumed(run: RunFolder) -> None:
    config = read_config(run.config)
    shutil.rmtree(run.path)
    assert dict(status_command.describe(run, config))["state"] == "removed"
    assert not run.path.exists()


def test_another_user_s_run_is_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.run_lock.touch()
    opened = os.open

    def denied(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == run.run_lock:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr("os.open", denied)
    result = CliRunner().invoke(app, ["status", str(run.path)])
    assert isinstance(result.exception, Refusal), result.output
    assert "run tiny-1 belongs to user" in str(result.exception)


def test_errors_of_samples_cannot_move_the_terminal_s_cursor(run: RunFolder) -> None:
    run.failure.write_text("the text was \x1b[2J\x9b")
    assert "error the text was \\x1b[2J\\x9b" in told(run)
