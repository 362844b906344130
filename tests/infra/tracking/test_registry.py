"""MLflow on a SQLite file of its own: what is logged can be read back, and the registry moves as it should."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.refusal import Refusal
from infra.tracking import registry, runs
from infra.tracking.client import NOTE, connect, experiment_id
from infra.tracking.promotion import DraftInService
from infra.tracking.registry import history
from infra.tracking.runs import TrackedRun

NAME = "draft-test"


@pytest.fixture(scope="module")
def uri(session_in_memory: Path) -> str:
    (session_in_memory / "tracking").mkdir()
    return f"sqlite:///{session_in_memory / 'tracking' / 'mlflow.db'}"


@pytest.fixture
def record(tmp_path: Path, uri: str) -> Path:
    config = {"seed": 3, "training": {"learning_rate": 0.1, "betas": [0.9, 0.95]}}
    runs.start_run(tmp_path / "tracking.json", uri, "test", "run-1", config, {"git_sha": "abc"})
    return tmp_path / "tracking.json"


@pytest.fixture
def run(record: Path) -> TrackedRun:
    return TrackedRun.read(record)


def promote(uri: str, name: str, version: int) -> registry.RegisteredDraft:
    return DraftInService(uri, name).promote(version, by="ada", reason="it is better")


def rollback(uri: str, name: str) -> int:
    return DraftInService(uri, name).rollback(by="ada", reason="it was not")


def new_version(run: TrackedRun, folder: Path, name: str, text: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    model_id = runs.log_folder(run, folder, "draft", 20, "draft")
    tags = {registry.RUN: text, registry.ACCEPTANCE: "2.5", "beats_prompt_lookup": "true"}
    return registry.register(run.uri, name, model_id, run.run_id, tags).version


def test_a_run_has_its_configuration_and_goes_on_where_it_was(record: Path, run: TrackedRun, uri: str) -> None:
    found = connect(uri).get_run(run.run_id)
    assert found.data.params == {"seed": "3", "training.learning_rate": "0.1", "training.betas": "[0.9, 0.95]"}
    assert found.data.tags["git_sha"] == "abc"
    runs.end_run(run, "FAILED")
    assert connect(uri).get_run(run.run_id).info.status == "FAILED"
    again = runs.start_run(record, uri, "test", "run-1", {}, {})
    assert again == run
    assert connect(uri).get_run(run.run_id).info.status == "RUNNING"


def test_a_run_goes_on_where_mlflow_has_moved_to_and_nowhere_else(tmp_path: Path) -> None:
    record, here, there = tmp_path / "tracking.json", tmp_path / "here.db", tmp_path / "there.db"
    first = runs.start_run(record, f"sqlite:///{here}", "test", "run-1", {}, {})
    with pytest.raises(Refusal) as refused:
        runs.start_run(record, f"sqlite:///{there}", "test", "run-1", {}, {})
    assert f"sqlite:///{there} has no run {first.run_id}" in str(refused.value)
    assert f"set tracking.uri or $MLFLOW_TRACKING_URI to sqlite:///{here}" in str(refused.value)
    assert TrackedRun.read(record) == first
    here.rename(moved := tmp_path / "moved.db")
    again = runs.start_run(record, f"sqlite:///{moved}", "test", "run-1", {}, {})
    assert again == TrackedRun.read(record)
    assert (again.uri, again.run_id) == (f"sqlite:///{moved}", first.run_id)


def test_artifacts_lie_beside_the_database(run: TrackedRun, uri: str) -> None:
    database = Path(uri.removeprefix("sqlite:///"))
    assert (database.parent / "mlflow-artifacts" / run.run_id / "artifacts" / "config.json").is_file()


def test_metrics_are_logged_once_over_steps_and_torn_lines_wait(record: Path, run: TrackedRun, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": s, "loss": 1 / s, "acceptance_by_position": [0.5, 0.25]}) for s in (10, 20, 30)]
    runs.log_new_metrics(record, metrics)
    metrics.write_text("\n".join(lines[:2]) + "\n" + lines[2][:9])
    runs.log_new_metrics(record, metrics)
    runs.log_new_metrics(record, metrics)
    metrics.write_text("\n".join(lines) + "\n")
    runs.log_new_metrics(record, metrics)
    client = MlflowClient(run.uri)
    losses = client.get_metric_history(run.run_id, "loss")
    assert [(m.step, m.value) for m in losses] == [(10, 0.1), (20, 0.05), (30, 1 / 30)]
    assert [m.value for m in client.get_metric_history(run.run_id, "training_acceptance/position_2")] == [0.25] * 3


def test_checkpoints_are_logged_models_without_the_optimizer(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000020"
    folder.mkdir(parents=True)
    for name in ("draft.safetensors", "manifest.json", "state.pt"):
        (folder / name).write_text(name)
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": s, "loss": 1 / s, "acceptance_by_position": [0.5, s / 100]} for s in (10, 18, 25)]
    lines[0]["heldout_acceptance_length"], lines[2]["heldout_acceptance_length"] = 1.25, 1.5
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model_id = runs.log_checkpoint(run, folder, 20, metrics)
    assert [path.name for path in folder.parent.iterdir()] == ["step-000020"]
    logged = connect(uri).get_logged_model(model_id)
    assert sorted(p.name for p in Path(logged.artifact_location.removeprefix("file://")).iterdir()) == [
        "draft.safetensors",
        "manifest.json",
    ]
    figures = {metric.key: metric.value for metric in logged.metrics}
    lengths = {"training_acceptance_length": 1.59, "heldout_acceptance_length": 1.25}
    assert figures == pytest.approx({f"checkpoint/{key}": value for key, value in {"loss": 1 / 18, **lengths}.items()})
    (output,) = connect(uri).get_run(run.run_id).outputs.model_outputs
    assert (output.model_id, output.step) == (model_id, 20)
    assert runs.logged_checkpoints(run) == {20}


def test_a_benchmark_belongs_to_its_draft_and_keeps_its_conditions(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    plot = tmp_path / "acceptance.png"
    plot.write_bytes(b"png")
    (tmp_path / "export").mkdir()
    model_id = runs.log_folder(run, tmp_path / "export", "draft", 20, "draft")
    runs.log_benchmark(
        run,
        model_id,
        metrics={"acceptance_length": 2.5},
        curves={"acceptance_length_by_lookahead/draft": {1: 1.5, 4: 2.5}},
        conditions={"temperature": 0.0, "versions": {"torch": "2"}},
        table={"lookahead": [1]},
        files=[plot],
        dataset=("python-docs (held out)", "e" * 36),
    )
    client = connect(uri)
    assert client.get_run(run.run_id).data.metrics["acceptance_length"] == 2.5
    curve = client.get_metric_history(run.run_id, "acceptance_length_by_lookahead/draft")
    assert [(point.step, point.value) for point in curve] == [(1, 1.5), (4, 2.5)]
    model = client.get_logged_model(model_id)
    assert [(metric.value, metric.dataset_name, metric.dataset_digest) for metric in model.metrics] == [
        (2.5, "python-docs (held out)", "e" * 36)
    ]
    assert model.params["conditions.temperature"] == "0.0"
    assert model.params["conditions.versions.torch"] == "2"
    names = {artifact.path for artifact in client.list_artifacts(run.run_id, "benchmark")}
    assert names == {"benchmark/acceptance.json", "benchmark/acceptance.png", "benchmark/conditions.json"}


def test_pages_are_described_and_hide_passwords(tmp_path: Path, uri: str) -> None:
    config = {"ledger": {"url": "postgresql://me:secret@db/x"}}
    run = runs.start_run(tmp_path / "tracking.json", uri, "described", "run-1", config, {NOTE: "Trains."})
    client = connect(uri)
    assert "champion" in client.get_experiment(run.experiment_id).tags[NOTE]
    assert client.get_run(run.run_id).data.tags[NOTE] == "Trains."
    assert client.get_run(run.run_id).data.params["ledger.url"] == "postgresql://me:***@db/x"
    (tmp_path / "report.html").write_text("<p>")
    runs.describe_run(run, "# Trained", {"gate": "passed"}, [tmp_path / "report.html"])
    tags = client.get_run(run.run_id).data.tags
    assert (tags[NOTE], tags["gate"]) == ("# Trained", "passed")
    assert {artifact.path for artifact in client.list_artifacts(run.run_id)} == {"config.json", "report.html"}
    (config_json,) = Path(uri.removeprefix("sqlite:///")).parent.rglob(f"{run.run_id}/artifacts/config.json")
    assert "secret" not in config_json.read_text()


def test_versions_and_their_models_are_described(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_text("weights")
    model_id = runs.log_folder(run, tmp_path / "export", "draft", 20, "draft")
    name = f"{NAME}-described"
    draft = registry.register(uri, name, model_id, run.run_id, {}, about="Drafts of x.", description="2.50 per step.")
    client = connect(uri)
    assert client.get_registered_model(name).description == "Drafts of x."
    assert client.get_model_version(name, str(draft.version)).description == "2.50 per step."
    tags = client.get_logged_model(model_id).tags
    assert tags[NOTE] == "2.50 per step."
    assert json.loads(tags[registry.VERSIONS_OF_MODEL]) == [{"name": name, "version": "1"}]


def test_a_description_too_long_for_postgresql_ends_at_a_line(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    model_id = runs.log_folder(run, tmp_path / "export", "draft", 20, "draft")
    rows = [f"| {number} | {'x' * 90} |" for number in range(80)]
    draft = registry.register(run.uri, f"{NAME}-long", model_id, run.run_id, {}, description="\n".join(rows))
    kept = registry.describe(uri, draft)
    assert 4800 < len(kept) <= 5000
    *table, _, last = kept.splitlines()
    assert table == rows[: len(table)]
    assert "report.html" in last
    assert connect(uri).get_logged_model(model_id).tags[NOTE] == kept


def test_challenger_champion_and_back(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    name = f"{NAME}-aliases"
    assert registry.champion(uri, name) is None
    assert registry.list_drafts(uri, name) == []
    one, two, three = (new_version(run, tmp_path / "export", name, f"run-{number}") for number in (1, 2, 3))
    assert registry.list_drafts(uri, name)[0].aliases == ("challenger",)
    assert promote(uri, name, one).tags[registry.REPLACES] == ""
    promoted = promote(uri, name, three)
    assert promoted.aliases == ("champion",)
    assert promoted.tags[registry.REPLACES] == str(one)
    assert promote(uri, name, three) == promoted, "repeated by the same person for the same reason"
    promote(uri, name, two)
    assert [(d.version, d.aliases) for d in registry.list_drafts(uri, name)] == [(3, ()), (2, ("champion",)), (1, ())]
    for withdrawn, serves in ((two, three), (three, one)):
        assert rollback(uri, name) == withdrawn
        now = registry.champion(uri, name)
        assert now
        assert now.version == serves
    assert [d.aliases for d in registry.list_drafts(uri, name)] == [(), (), ("champion",)]
    DraftInService(uri, name).refuse(registry.list_drafts(uri, name)[1].version, by="gate", reason="x" * 9000)
    found = history(uri, name)
    assert [(made.version, made.outcome, made.champion_before) for made in found] == [
        (one, "promoted", None),
        (three, "promoted", one),
        (two, "promoted", three),
        (two, "rolled back", two),
        (three, "rolled back", three),
        (two, "refused", one),
    ]
    assert rollback(uri, name) == one
    assert registry.champion(uri, name) is None, "the first champion can be withdrawn, too"
    assert (found[0].by, found[0].reason) == ("ada", "it is better")


def test_versions_are_found_by_run_and_downloaded(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    name = f"{NAME}-downloads"
    for number in (1, 2):
        new_version(run, tmp_path / "export", name, f"run-{number}")
    found = registry.version_of_run(uri, name, "run-1")
    assert found is not None
    assert (found.version, found.acceptance_length) == (1, 2.5)
    assert registry.version_of_run(uri, name, "run-9") is None
    folder = registry.download(uri, found, tmp_path / "champion")
    assert (folder / "model.safetensors").read_text() == "run-1"


def test_refusals_say_what_to_do(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    name = f"{NAME}-refusals"
    with pytest.raises(ValueError, match="no draft draft-test-refusals is registered"):
        history(uri, name)
    with pytest.raises(ValueError, match="no draft draft-test-refusals is registered"):
        rollback(uri, name)
    new_version(run, tmp_path / "export", name, "run-1")
    with pytest.raises(ValueError, match="no champion to roll back"):
        rollback(uri, name)
    with pytest.raises(ValueError, match="has no version 7: `draftsmith drafts list`"):
        promote(uri, name, 7)


def test_a_name_with_an_apostrophe_is_no_filter(uri: str) -> None:
    with pytest.raises(ValueError, match="no draft o'brien is registered"):
        history(uri, "o'brien")
    assert registry.list_drafts(uri, "o'brien") == []


def test_a_deleted_experiment_is_named_with_the_way_back(uri: str) -> None:
    client = connect(uri)
    client.delete_experiment(found := experiment_id(client, "gone"))
    with pytest.raises(Refusal, match=f"mlflow experiments restore --experiment-id {found}"):
        experiment_id(client, "gone")


def test_processes_may_create_the_database_together(tmp_path: Path) -> None:
    script = (
        "import sys; from infra.tracking.client import connect, experiment_id; "
        "print(experiment_id(connect(sys.argv[1]), 'x'))"
    )
    command = [sys.executable, "-c", script, f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ended
    assert len({out for out, _ in ended}) == 1
    assert [err for _, err in ended] == ["", "", ""]


def test_a_version_without_its_benchmarks_counts_is_refused(run: TrackedRun, uri: str, tmp_path: Path) -> None:
    version = new_version(run, tmp_path / "uncounted", "draft-uncounted", "x")
    draft = registry.find_version(uri, "draft-uncounted", version)
    assert draft.acceptance_length == 2.5
    with pytest.raises(ValueError, match=r"has no benchmark/request_counts\.json"):
        registry.read_request_counts(uri, draft)


def test_a_version_whose_run_is_gone_is_refused(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = runs.start_run(tmp_path / "tracking.json", uri, "test", "run-1", {}, {})
    new_version(run, tmp_path / "export", NAME, "x")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:  # as `mlflow gc` does
        for table in ("tags", "params", "runs"):
            database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run.run_id,))
    with pytest.raises(Refusal, match=rf"the run of version 1 of {NAME} has no benchmark/gate\.json"):
        registry.read_artifact(uri, registry.find_version(uri, NAME, 1), registry.EVIDENCE)
