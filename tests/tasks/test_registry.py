"""From a benchmark to a registered, promoted version and the figures of the report."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from infra.records import (
    Acceptance,
    BenchmarkResult,
    Conditions,
    ExportRecord,
    GateDecision,
    LosslessRecord,
    Progress,
    SpeedRecord,
    TargetRecord,
    TrainingResult,
)
from infra.tracking import registry
from infra.tracking.client import connect
from infra.tracking.runs import TrackedRun, start_run
from models.config import load_recipe
from tasks.registry import acceptance_table, promote_draft, register_draft
from tasks.report import benchmark_report, training_report
from tasks.run import OpenRun, open_run

ROOT = Path(__file__).parents[2]


def acceptance(length: float) -> Acceptance:
    return Acceptance(conversations=8, length={1: 1.5, 4: length}, steps={1: 90, 4: 50}, by_position=(0.9, 0.5, None))


@pytest.fixture
def result() -> BenchmarkResult:
    conditions = Conditions(
        target="tiny", target_revision="rev", draft="export", draft_revision="sha", dataset_hash="data", thinking=False,
        template_hash="none", temperature=0.0, sampled_temperature=1.0, prompts=8, prompt_tokens=64, max_new_tokens=64,
        lookahead=4, topk=1, concurrency=1, engine="reference", versions={"torch": "2"}, dtype="float32",
        hardware="cpu", threads=1,
    )  # fmt: skip
    gate = GateDecision(
        passed=True, against="no draft", challenger=3.5, champion=1.0, difference=2.5, lower_bound=2.0, margin=0.01,
        smallest_detectable=0.1, reason="better",
    )  # fmt: skip
    speed = SpeedRecord(
        tokens=100, acceptance_length=3.5, plain_tokens_per_s=50.0, speculative_tokens_per_s=None, speedup=None,
        flagged=True, note="impossible",
    )  # fmt: skip
    return BenchmarkResult(
        conditions=conditions, target_distinct_token_share=0.4, sampled_distinct_token_share=0.7,
        simulated=acceptance(3.5), reference=Acceptance(conversations=4, length={4: 3.5}, steps={4: 9}, by_position=()),
        gap=0.0, counts_identical=True, counts_compared=4, sampled=acceptance(2.5), prompt_lookup=acceptance(2.1),
        prompt_lookup_sampled=acceptance(1.2), champion=None, beats_prompt_lookup=True, gate=gate, speed=speed,
        lossless=LosslessRecord(tokens=1000, mismatches=0, ties=1, divergences=()), summary="Good.", wall_s=1.0,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenRun]:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with disable_run_logger(), open_run(load_recipe(ROOT / "recipes" / "tiny.yaml"), "registered") as opened:
        opened.folder.export.mkdir()
        (opened.folder.export / "model.safetensors").write_text("weights")
        opened.folder.plots.mkdir()
        (opened.folder.plots / "acceptance.png").write_text("png")
        yield opened


@pytest.fixture
def tracking(run: OpenRun) -> TrackedRun:
    return start_run(run.tracking_record, run.tracking_uri, "draftsmith", run.folder.name, {}, {})


TARGET = TargetRecord(
    name="tiny", path="/t", revision="rev", model_type="llama", hidden_size=8, num_layers=2, vocab_size=16, licence="x"
)
TRAINED = TrainingResult(
    steps=20, tokens=1000, wall_s=12.0, data_wait_s=0.5, step_s=10.0, checkpoint="checkpoints/step-000020",
    final_loss=1.0, acceptance_by_position=(0.5,), vocabulary_coverage=0.9,
)  # fmt: skip


def test_a_run_registers_one_version_and_promotes_it_once(
    run: OpenRun, tracking: TrackedRun, result: BenchmarkResult
) -> None:
    export = ExportRecord(path=str(run.folder.export), layout="sglang", sha256={})
    draft = register_draft.fn(run, tracking, TARGET, TRAINED, export, result)
    assert (draft.name, draft.version, draft.aliases, draft.acceptance_length) == (
        "draft-tiny",
        1,
        ("challenger",),
        3.5,
    )
    assert draft.tags["beats_prompt_lookup"] == "true"
    assert draft.tags["target_revision"] == "rev"
    assert register_draft.fn(run, tracking, TARGET, TRAINED, export, result) == draft
    metrics = connect(tracking.uri).get_run(tracking.run_id).data.metrics
    assert metrics["acceptance_length"] == 3.5
    assert metrics["acceptance_length/lookahead-1"] == 1.5
    assert "speculative_tokens_per_s" not in metrics
    promoted = promote_draft.fn(run, draft)
    assert promoted.aliases == ("champion",)
    assert promote_draft.fn(run, promoted) == promoted
    assert registry.champion(tracking.uri, "draft-tiny") == promoted


def test_the_table_has_a_row_per_lookahead_and_no_champion_where_there_is_none(result: BenchmarkResult) -> None:
    table = acceptance_table(result)
    assert table["lookahead"] == [1, 4]
    assert table["reference"] == [None, 3.5]
    assert table["prompt lookup"] == [1.5, 2.1]
    assert "champion" not in table


def test_the_report_holds_what_was_promised(result: BenchmarkResult) -> None:
    trained = training_report(TRAINED, Progress(consumed=30, pending=9, quarantined=1, attempts=3))
    assert trained["samples"] == {"total": 40, "consumed": 30, "quarantined": 1, "capture_failures": 3}
    assert trained["tokens"] == 1000
    assert {"steps": 20, "wall_s": 12.0, "data_wait_share": 0.05, "tokens_per_s": 100.0}.items() <= trained[
        "train"
    ].items()
    report = benchmark_report(result)
    assert report["acceptance"]["simulated"] == {"length": {1: 1.5, 4: 3.5}, "by_position": [0.9, 0.5, None]}
    assert report["acceptance"]["reference"]["length"] == {4: 3.5}
    assert report["baseline"]["prompt_lookup"] == 2.1
    assert report["target"]["distinct_token_share"] == 0.4
    assert report["lossless"] == {"tokens": 1000, "mismatches": 0, "ties": 1}
    assert report["speed"]["plain_tokens_per_s"] == 50.0
    assert report["speed"]["speculative_tokens_per_s"] is None
    assert report["conditions"]["lookahead"] == 4
