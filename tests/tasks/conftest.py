"""A small finished run, as records: what the tasks after training are given."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from infra.files.atomic import write_atomically
from infra.records.acceptance import (
    Acceptance,
    BenchmarkResult,
    Conditions,
    GateDecision,
    LosslessRecord,
    RegisteredDraft,
    RequestCounts,
    SpeedRecord,
)
from infra.records.data_path import SamplesRecord, SideRates, TargetRecord, TrainingResult
from infra.records.drafts import CapturePrecision, ExportRecord, StartRecord
from infra.records.goodput import CostFit, Goodput, GoodputTable, MeasuredGoodput
from infra.tracking.runs import TrackedRun, start_run
from models.config.recipe import load_recipe
from tasks.registry import register_draft
from tasks.run import OpenRun, open_run

ROOT = Path(__file__).parents[2]
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b8"
    "0000000049454e44ae426082"
)


def acceptance(length: float) -> Acceptance:
    return Acceptance(conversations=8, length={1: 1.5, 4: length}, steps={1: 90, 4: 50}, by_position=(0.9, 0.5, None))


def goodput() -> MeasuredGoodput:
    """By hand: 3 proposals for one text, none for 16."""
    fit = CostFit(
        constant=0.01, per_text=0.0, per_token=0.0, knee=0.0, per_token_beyond=0.0, several=0.0, several_per_text=0.0,
        together=0.0, per_position=0.0,
    )  # fmt: skip
    rows = tuple(
        Goodput(batch=batch, lookahead=at, step_s=0.01, tokens_per_step=2.5, tokens_per_s=speed)
        for batch, at, speed in [(1, 0, 100.0), (1, 3, 250.0), (16, 0, 800.0), (16, 3, 600.0)]
    )
    return MeasuredGoodput(
        main_load=1, draft=GoodputTable(rates=(0.7, 0.5, 0.4), target=fit, draft=fit, rows=rows), champion=None,
        target_times=(), draft_times=(), hardware="8 CPU cores",
    )  # fmt: skip


@pytest.fixture
def tmp_path(path_in_memory: Path) -> Path:
    """Nothing here is about a disk."""
    return path_in_memory


@pytest.fixture
def result() -> BenchmarkResult:
    conditions = Conditions(
        target="tiny", target_revision="rev", draft="export", draft_revision="sha", dataset_hash="data", thinking=False,
        template_hash="none", temperature=0.0, sampled_temperature=1.0, prompts=8, prompt_tokens=64, max_new_tokens=64,
        proposals="greedy", lookahead=4, topk=1, concurrency=1, engine="reference", versions={"torch": "2"},
        dtype="float32", hardware="cpu", threads=1,
    )  # fmt: skip
    gate = GateDecision(
        ground="held-out prompts", passed=True, against="no draft", challenger=3.5, champion=1.0, difference=2.5,
        lower_bound=2.0, margin=0.01, smallest_detectable=0.1, reason="better", grounds=(),
    )  # fmt: skip
    speed = SpeedRecord(
        tokens=100, acceptance_length=3.5, plain_tokens_per_s=50.0, speculative_tokens_per_s=None, speedup=None,
        flagged=True, note="impossible",
    )  # fmt: skip
    return BenchmarkResult(
        conditions=conditions, traffic="greedy", target_distinct_token_share=0.4, sampled_distinct_token_share=0.7,
        acceptance=acceptance(3.5),
        reference=Acceptance(conversations=4, length={4: 3.5}, steps={4: 9}, by_position=()),
        gap=0.0, counts_identical=True, counts_compared=4, sampled=acceptance(2.5), prompt_lookup=acceptance(2.1),
        prompt_lookup_sampled=acceptance(1.2), champion=None,
        more_baselines={"Token Recycling": acceptance(1.9), "suffix decoding": acceptance(1.8)},
        more_baselines_sampled={"Token Recycling": acceptance(1.1), "suffix decoding": acceptance(1.15)},
        gate=gate, speed=speed, goodput=goodput(),
        lossless=LosslessRecord(tokens=1000, mismatches=0, ties=1, divergences=()), summary="Good.", wall_s=1.0,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: BenchmarkResult) -> Iterator[OpenRun]:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml")
    with disable_run_logger(), open_run(recipe, "registered", create=True) as opened:
        opened.folder.export.mkdir()
        (opened.folder.export / "model.safetensors").write_text("weights")
        (opened.folder.export / "serving").mkdir()
        (opened.folder.export / "serving" / "sglang.json").write_text("{}")
        exported = ExportRecord(path=str(opened.folder.export), layouts=("sglang",), sha256={})
        write_atomically(opened.folder.exported, exported)
        opened.folder.plots.mkdir()
        (opened.folder.plots / "acceptance_by_position.png").write_bytes(PNG)
        rows = ((20, 8), (18, 6)) * 16  # 32 conversations, as many as the quickstart benchmarks
        counts = RequestCounts(conditions=result.conditions, greedy={4: rows}, sampled={4: rows})
        write_atomically(opened.folder.request_counts, counts)
        opened.folder.gate.write_text("{}")
        precision = CapturePrecision(quantization=None, dtype="float32", engine="transformers 5")
        write_atomically(opened.folder.precision, precision)
        yield opened


@pytest.fixture
def tracking(run: OpenRun) -> TrackedRun:
    return start_run(run.tracking_record, run.tracking_uri, "draftsmith", run.folder.name, {}, {})


@pytest.fixture
def target() -> TargetRecord:
    return TargetRecord(
        name="tiny", path="/t", revision="rev", model_type="llama", hidden_size=8, num_layers=2, vocab_size=16,
        licence="x",
    )  # fmt: skip


@pytest.fixture
def samples() -> SamplesRecord:
    return SamplesRecord(
        path="/cache/samples", dataset_hash="data", template_hash="none", train_samples=1234, heldout_samples=56,
        train_tokens=7890123, longest=255, supervised_share=0.987, dropped=11, truncated=22, unusable=33, split=44,
        duplicates=55, benchmark_prompts=66, compared_prompts=77, thinking=88, source_revision="c0ffee",
    )  # fmt: skip


@pytest.fixture
def trained() -> TrainingResult:
    rates = SideRates(inference=2000.0, transport=9000.0, training=105.0, data_wait_share=0.03, generators=2, ranks=1)
    return TrainingResult(
        steps=20, tokens=1000, wall_s=10.0, data_wait_s=0.5, checkpoint="checkpoints/step-000020-1",
        final_loss=1.25, acceptance_by_position=(0.51, 0.32), vocabulary_coverage=0.912, token_coverage=0.956,
        checkpoint_stall_s=0.012, rates=rates,
    )  # fmt: skip


@pytest.fixture
def export(run: OpenRun) -> ExportRecord:
    precision = CapturePrecision(
        quantization=None, dtype="bfloat16", engine="sglang 0.5.23", kernels={"attention": "fa3"}
    )
    start = StartRecord(draft="champion", run=None, target="base", target_revision="b", precision=precision)
    sha256 = {"model.safetensors": "5a" * 32}
    return ExportRecord(path=str(run.folder.export), layouts=("sglang",), sha256=sha256, started_from=start)


@pytest.fixture
def draft(
    run: OpenRun,
    tracking: TrackedRun,
    target: TargetRecord,
    trained: TrainingResult,
    export: ExportRecord,
    result: BenchmarkResult,
) -> RegisteredDraft:
    """Registered, and not registered twice."""
    found = register_draft.fn(run, tracking, target, trained, export, result)
    assert register_draft.fn(run, tracking, target, trained, export, result) == found
    return found
