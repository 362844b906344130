"""From a benchmark to a registered, promoted version."""

from pathlib import Path

import pytest

from infra.records.acceptance import BenchmarkResult, RegisteredDraft, RequestCounts
from infra.records.data_path import TargetRecord, TrainingResult
from infra.records.drafts import ExportRecord
from infra.tracking.client import NOTE, connect
from infra.tracking.registry import CHALLENGER, download
from infra.tracking.runs import TrackedRun
from tasks.registry import acceptance_table, open_tracking, register_draft, tracked, why_unwatchable
from tasks.run import OpenRun


def test_a_run_registers_one_version_with_its_serving_settings(
    tracking: TrackedRun, draft: RegisteredDraft, tmp_path: Path
) -> None:
    assert (draft.name, draft.version, draft.aliases) == ("draft-tiny", 1, ("challenger",))
    assert draft.acceptance_length == 3.5
    assert (draft.tags["beats_prompt_lookup"], draft.tags["not_beaten"]) == ("true", "none")
    assert draft.tags["target_revision"] == "rev"
    lineage = {name: value for name, value in draft.tags.items() if name.startswith("started_from")}
    assert lineage == {
        "started_from": "champion",
        "started_from_target": "base",
        "started_from_target_revision": "b",
        "started_from_precision": "sglang 0.5.23, bfloat16, attention fa3",
    }
    assert draft.tags["gate"] == "passed"
    assert (draft.tags["lookahead"], draft.tags["best_lookahead"]) == ("4", "3")
    assert draft.tags["weights_sha256"] == "5a" * 32
    folder = download(tracking.uri, draft, tmp_path / "downloaded")
    assert (folder / "serving" / "sglang.json").read_text() == "{}"


def test_a_benchmark_too_small_for_the_drift_test_is_named_when_it_is_registered(
    draft: RegisteredDraft, result: BenchmarkResult
) -> None:
    assert draft.tags["drift_test"] == "possible"
    few = ((20, 8), (18, 6)) * 16 + ((60, 8),) * 4
    varied = RequestCounts(conditions=result.conditions, greedy={4: few}, sampled={})
    why = why_unwatchable(varied)
    assert why
    assert "set benchmark.prompts to more than" in why
    assert why_unwatchable(varied.model_copy(update={"greedy": {4: few * 40}})) is None
    assert "at least 20" in str(why_unwatchable(varied.model_copy(update={"greedy": {4: few[:8]}})))


def test_a_registration_that_was_interrupted_is_completed(
    run: OpenRun,
    tracking: TrackedRun,
    draft: RegisteredDraft,
    target: TargetRecord,
    trained: TrainingResult,
    export: ExportRecord,
    result: BenchmarkResult,
) -> None:
    """A version without the alias was left; it becomes the challenger, so that the gate can promote it."""
    connect(tracking.uri).delete_registered_model_alias(draft.name, CHALLENGER)
    again = register_draft.fn(run, tracking, target, trained, export, result)
    assert (again.version, again.aliases) == (draft.version, (CHALLENGER,))


def test_mlflow_shows_what_the_version_is_worth(tracking: TrackedRun, draft: RegisteredDraft) -> None:
    client = connect(tracking.uri)
    metrics = client.get_run(tracking.run_id).data.metrics
    assert metrics["acceptance_length"] == 3.5
    assert metrics["benchmark/acceptance_length_prompt_lookup"] == 2.1
    assert metrics["benchmark/acceptance_length_token_recycling"] == 1.9
    assert "benchmark/speculative_tokens_per_s" not in metrics
    curve = client.get_metric_history(tracking.run_id, "acceptance_length_by_lookahead/draft")
    assert [(point.step, point.value) for point in curve] == [(1, 1.5), (4, 3.5)]
    curve = client.get_metric_history(tracking.run_id, "goodput_by_lookahead/16_at_once")
    assert [(point.step, point.value) for point in curve] == [(0, 800.0), (3, 600.0)]
    version = client.get_model_version(draft.name, str(draft.version))
    assert str(version.description).startswith("3.50 tokens per step, gate passed against no draft")
    assert "32 new tokens" not in str(version.description)
    assert "64 new tokens, lookahead 4" in str(version.description)
    assert "tiny" in str(client.get_registered_model(draft.name).description)
    model = client.get_logged_model(draft.model_id)
    assert model.params["conditions.lookahead"] == "4"
    assert model.params["conditions.versions.torch"] == "2"
    assert model.tags[NOTE] == version.description


def test_the_table_has_a_row_per_lookahead_and_no_champion_where_there_is_none(result: BenchmarkResult) -> None:
    table = acceptance_table(result)
    assert table["lookahead"] == [1, 4]
    assert table["draft, real decoding"] == [None, 3.5]
    assert table["prompt lookup"] == [1.5, 2.1]
    assert "champion" not in table


@pytest.mark.parametrize("fails", [False, True])
def test_an_mlflow_that_is_away_at_the_end_hides_no_outcome(
    run: OpenRun, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.registry.open_tracking", open_tracking.fn)  # without a Prefect server
    database = Path(run.tracking_uri.removeprefix("sqlite:///"))

    def body() -> str:
        with tracked(run):
            database.unlink()
            database.mkdir()
            if fails:
                raise RuntimeError("generator 0 ended with 1")
            return "promoted"

    if fails:
        with pytest.raises(RuntimeError, match="generator 0"):
            body()
    else:
        assert body() == "promoted"
