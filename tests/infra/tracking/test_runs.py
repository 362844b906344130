"""A run in MLflow is one run, whatever fails while it is opened, and shows its curves with their times."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from infra.tracking import registry, runs
from infra.tracking.client import connect
from infra.tracking.runs import TrackedRun

CONFIG = {"seed": 3, "training": {"ranks": 2}}
TAGS = {runs.RUNS: "0123", runs.FOLDER: "run-1"}


def open_run(folder: Path, uri: str, config: dict[str, object] | None = None) -> TrackedRun:
    return runs.start_run(folder / "tracking.json", uri, "test", "run-1", CONFIG if config is None else config, TAGS)


def test_a_store_that_fails_while_a_run_is_opened_leaves_one_run(
    tmp_path: Path, registry_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_arguments: object) -> None:
        raise MlflowException("500 from the artifact store")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_dict", away)
        for _ in range(2):
            with pytest.raises(MlflowException, match="artifact store"):
                open_run(tmp_path, registry_uri)
    run, client = open_run(tmp_path, registry_uri), connect(registry_uri)
    (found,) = client.search_runs([run.experiment_id])
    assert found.info.run_id == run.run_id
    assert found.data.params == {"seed": "3", "training.ranks": "2"}
    assert client.list_artifacts(run.run_id)[0].path == "config.json"


def lose_the_first_answer(patch: pytest.MonkeyPatch, request: str) -> None:
    """MLflow's client sends a request again whose answer was lost: a proxy says 502, or the connection breaks."""
    send = getattr(MlflowClient, request)

    def sent(*arguments: object, **more: object) -> object:
        send(*arguments, **more)
        return send(*arguments, **more)

    patch.setattr(MlflowClient, request, sent)


def test_a_run_whose_creation_is_not_answered_is_one_run(
    tmp_path: Path, registry_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, others = connect(registry_uri), {runs.RUNS: "4567", runs.FOLDER: "run-1"}
    other = runs.start_run(tmp_path / "other.json", registry_uri, "test", "run-1", CONFIG, others)
    with monkeypatch.context() as patch:
        lose_the_first_answer(patch, "create_run")
        run = open_run(tmp_path, registry_uri)
    found = client.search_runs([run.experiment_id], order_by=["attributes.start_time ASC"])
    assert [one.info.run_id for one in found] == [other.run_id, run.run_id]
    # The process was killed before it had noted the run.
    (tmp_path / "tracking.json").unlink()
    client.set_terminated(run.run_id, "KILLED")
    assert open_run(tmp_path, registry_uri) == run
    assert client.get_run(run.run_id).info.status == "RUNNING"


def test_a_version_whose_registration_is_not_answered_is_one_version(
    tmp_path: Path, registry_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, drafts = open_run(tmp_path, registry_uri), list[registry.RegisteredDraft]()
    for name in ("run-1", "run-2", "run-2"):
        with monkeypatch.context() as patch:
            lose_the_first_answer(patch, "create_model_version")
            model = connect(registry_uri).create_logged_model(run.experiment_id, "draft", run.run_id)
            drafts.append(registry.register(registry_uri, "draft-a", model.model_id, run.run_id, {registry.RUN: name}))
    listed = registry.list_drafts(registry_uri, "draft-a")
    assert [(one.version, one.tags[registry.RUN], one.aliases) for one in listed] == [
        (3, "run-2", ("challenger",)),
        (1, "run-1", ()),
    ]
    assert [one.version for one in drafts] == [1, 3, 3]
    # No request was answered, and the process ended: one that people have decided on stays.
    for alias in ("", "champion"):
        model = connect(registry_uri).create_logged_model(run.experiment_id, "draft", run.run_id)
        made = [
            connect(registry_uri).create_model_version("draft-a", model.model_uri, tags={registry.RUN: f"lost{alias}"})
            for _ in range(2)
        ]
        if alias:
            connect(registry_uri).set_registered_model_alias("draft-a", alias, made[1].version)
        again = registry.register(registry_uri, "draft-a", model.model_id, run.run_id, {registry.RUN: f"lost{alias}"})
        assert again.version == int(made[bool(alias)].version)


def test_a_run_that_was_deleted_is_restored_where_it_goes_on(tmp_path: Path, registry_uri: str) -> None:
    run, client = open_run(tmp_path, registry_uri), connect(registry_uri)
    client.delete_run(run.run_id)
    # Placement may have changed meanwhile; MLflow takes no second value of a parameter.
    assert open_run(tmp_path, registry_uri, {"seed": 3, "training": {"ranks": 4}}) == run
    found = client.get_run(run.run_id)
    assert (found.info.lifecycle_stage, found.info.status) == ("active", "RUNNING")
    client.delete_run(run.run_id)
    runs.restore(run)
    assert client.get_run(run.run_id).info.lifecycle_stage == "active"


def test_points_have_the_time_of_their_lines_and_come_once_after_a_failure(
    tmp_path: Path, registry_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, metrics = open_run(tmp_path, registry_uri), tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": 1 / step, "time": 1000.0 + step} for step in range(1, 7)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(runs, "BATCH", 2)
    log, calls = MlflowClient.log_batch, list[int]()

    def flaky(client: MlflowClient, run_id: str, metrics: list[Metric]) -> None:
        calls.append(len(metrics))
        if len(calls) == 3:
            raise OSError("away")
        log(client, run_id, metrics=metrics)

    monkeypatch.setattr(MlflowClient, "log_batch", flaky)
    with pytest.raises(OSError, match="away"):
        runs.log_new_metrics(tmp_path / "tracking.json", metrics)
    assert TrackedRun.read(tmp_path / "tracking.json").logged_step == 4
    runs.log_new_metrics(tmp_path / "tracking.json", metrics)
    points = connect(registry_uri).get_metric_history(run.run_id, "loss")
    assert [(point.step, point.timestamp) for point in points] == [
        (step, 1_000_000 + 1000 * step) for step in range(1, 7)
    ]
    assert "data_path/time" not in connect(registry_uri).get_run(run.run_id).data.metrics
