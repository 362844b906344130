"""From a benchmark to a registered, promoted version."""

from pathlib import Path

from infra.results import BenchmarkResult, RegisteredDraft
from infra.tracking.client import NOTE, connect
from infra.tracking.registry import download
from infra.tracking.runs import TrackedRun
from tasks.registry import acceptance_table


def test_a_run_registers_one_version_with_its_serving_settings(
    tracking: TrackedRun, draft: RegisteredDraft, tmp_path: Path
) -> None:
    assert (draft.name, draft.version, draft.aliases) == ("draft-tiny", 1, ("challenger",))
    assert draft.acceptance_length == 3.5
    assert draft.tags["beats_prompt_lookup"] == draft.tags["beats_token_recycling"] == "true"
    assert draft.tags["target_revision"] == "rev"
    assert draft.tags["gate"] == "passed"
    assert (draft.tags["lookahead"], draft.tags["best_lookahead"]) == ("4", "3")
    assert draft.tags["weights_sha256"] == "5a" * 32
    folder = download(tracking.uri, draft, tmp_path / "downloaded")
    assert (folder / "serving" / "sglang.json").read_text() == "{}"


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
    assert "64 new tokens, temperature 0, lookahead 4" in str(version.description)
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
