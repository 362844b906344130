"""MLflow keeps the newest runs, what serves and the way back from it; the rest leaves store, registry and database."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from infra.tracking import registry, runs
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService
from infra.tracking.retention import (
    empty_trash,
    end_gone_runs,
    identity,
    note_experiment,
    noted_experiments,
    remove_old_tracking,
)
from infra.tracking.runs import TrackedRun

NAME = "draft-test"
EXPERIMENTS = ["test"]


@pytest.fixture
def database(registry_uri: str) -> Path:
    return Path(registry_uri.removeprefix("sqlite:///"))


def make_run(
    folder: Path, uri: str, number: int, recipe: str = "test", experiment: str = "test", model: str | None = None
) -> int:
    """A finished run with two checkpoints and a registered version; the version."""
    record = folder / f"{recipe}-{number}" / "tracking.json"
    tags = {"mlflow.source.name": f"draftsmith retrain {recipe}-{number}"}
    config = {"name": recipe, "tracking": {"registered_model": model}}
    run = runs.start_run(record, uri, experiment, f"{recipe}-{number}", config, tags)
    weights = record.parent / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_text("w" * 10_000)
    for step in (10, 20):
        runs.log_folder(run, weights, f"checkpoint-{step:06d}", step, "checkpoint")
    model_id = runs.log_folder(run, weights, "draft", 20, "draft")
    tags = {registry.RUN: record.parent.name}
    draft = registry.register(uri, model or f"draft-{recipe}", model_id, run.run_id, tags)
    runs.end_run(run, "FINISHED")
    return draft.version


class NoArtifacts(BaseHTTPRequestHandler):
    """A server that proxies artifacts, and has none."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"files": []}')

    do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def artifact_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NoArtifacts) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def kept_checkpoints(folder: Path, number: int) -> set[int]:
    return runs.logged_checkpoints(TrackedRun.read(folder / f"test-{number}" / "tracking.json"))


def weights_in(folder: Path) -> int:
    return len(list(folder.rglob("mlflow-artifacts/**/model.safetensors")))


def test_old_runs_go_and_the_champion_and_the_version_before_it_stay(tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    for number in range(6):
        version = make_run(tmp_path, uri, number)
        if version in (1, 2):
            DraftInService(uri, NAME).promote(version, by="ada", reason="better")
    make_run(tmp_path, uri, 0, recipe="other")
    before = weights_in(tmp_path)
    removed_runs, removed_checkpoints = remove_old_tracking(uri, EXPERIMENTS, keep_runs=2, keep_checkpoints=1)
    assert removed_runs == 2
    # 6, the challenger, and 5 are the newest; 2 is champion and 1 the version that it replaced.
    assert {draft.version for draft in registry.list_drafts(uri, NAME)} == {1, 2, 5, 6}
    assert {draft.version for draft in registry.list_drafts(uri, "draft-other")} == {1}
    assert [kept_checkpoints(tmp_path, number) for number in (0, 1, 4, 5)] == [set(), set(), set(), {10, 20}]
    # Two runs with 3 folders of weights each, and the checkpoints of three more.
    assert removed_checkpoints == 6
    assert weights_in(tmp_path) == before - 2 * 3 - 6
    for version in (1, 2, 6):
        registry.download(uri, registry.find_version(uri, NAME, version), tmp_path / f"export-{version}")
    assert remove_old_tracking(uri, EXPERIMENTS, keep_runs=2, keep_checkpoints=1)[0] == 0


def test_a_deleted_version_that_the_champion_replaced_stops_no_clean_up(tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    for number in range(4):
        version = make_run(tmp_path, uri, number)
        if version in (1, 2):
            DraftInService(uri, NAME).promote(version, by="ada", reason="better")
    connect(uri).delete_model_version(NAME, "1")
    assert remove_old_tracking(uri, EXPERIMENTS, keep_runs=1, keep_checkpoints=1)[0] == 2
    assert {draft.version for draft in registry.list_drafts(uri, NAME)} == {2, 4}


def test_a_version_that_was_copied_to_a_model_of_the_operator_s_keeps_its_weights(
    tmp_path: Path, database: Path
) -> None:
    uri = f"sqlite:///{database}"
    for number in range(3):
        make_run(tmp_path, uri, number)
    client = connect(uri)
    client.create_registered_model("in-production")
    copy = client.copy_model_version(f"models:/{NAME}/1", "in-production")
    client.set_registered_model_alias("in-production", "live", copy.version)
    assert remove_old_tracking(uri, EXPERIMENTS, keep_runs=1, keep_checkpoints=1)[0] == 1
    assert client.get_model_version_by_alias("in-production", "live").version == copy.version
    assert {draft.version for draft in registry.list_drafts(uri, NAME)} == {1, 3}
    registry.download(uri, registry.find_version(uri, NAME, 1), tmp_path / "export")


def test_rows_leave_the_database_when_the_trash_is_emptied(tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    for number in range(3):
        make_run(tmp_path, uri, number)
    remove_old_tracking(uri, EXPERIMENTS, keep_runs=1, keep_checkpoints=1)

    def rows(table: str) -> int:
        with sqlite3.connect(database) as connection:
            return connection.execute(f"select count(*) from {table}").fetchone()[0]

    assert (rows("runs"), rows("logged_models")) == (3, 9)
    empty_trash(uri, uri, days=30)
    assert (rows("runs"), rows("logged_models")) == (3, 9)
    empty_trash(uri, uri, days=0)
    assert (rows("runs"), rows("logged_models")) == (1, 3)


def test_a_run_that_is_going_on_and_a_stranger_s_run_stay(tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    tags = {"mlflow.source.name": "draftsmith retrain running"}
    running = runs.start_run(tmp_path / "running.json", uri, "test", "running", {"name": "test"}, tags)
    stranger = runs.start_run(tmp_path / "stranger.json", uri, "test", "stranger", {"name": "test"}, {})
    runs.end_run(stranger, "FINISHED")
    assert remove_old_tracking(uri, EXPERIMENTS, keep_runs=0, keep_checkpoints=0)[0] == 0
    stages = {connect(uri).get_run(run.run_id).info.lifecycle_stage for run in (running, stranger)}
    assert stages == {"active"}


def test_a_run_that_can_be_resumed_stays(tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    for number in range(3):
        make_run(tmp_path, uri, number)
    unfinished = {TrackedRun.read(tmp_path / "test-1" / "tracking.json").run_id}
    assert remove_old_tracking(uri, EXPERIMENTS, keep_runs=0, keep_checkpoints=0, resumable=unfinished) == (1, 2)
    assert kept_checkpoints(tmp_path, 1) == {10, 20}
    assert {draft.version for draft in registry.list_drafts(uri, NAME)} == {2, 3}


def test_a_run_whose_folder_is_gone_has_ended(tmp_path: Path, database: Path) -> None:
    uri, client = f"sqlite:///{database}", connect(f"sqlite:///{database}")
    ours = {"mlflow.source.name": "draftsmith retrain x"}
    places = {
        "gone": {runs.RUNS: identity(tmp_path), runs.FOLDER: "gone"},
        "there": {runs.RUNS: identity(tmp_path), runs.FOLDER: "there"},
        "elsewhere": {runs.RUNS: identity(tmp_path / "other"), runs.FOLDER: "gone"},
        "unknown": {},
    }
    (tmp_path / "there").mkdir()
    for name, place in places.items():
        runs.start_run(tmp_path / f"{name}.json", uri, "test", name, {}, ours | place)
    assert end_gone_runs(uri, EXPERIMENTS, tmp_path) == 1
    experiment = client.get_experiment_by_name("test")
    assert experiment
    ended = {run.info.run_name: run.info.status for run in client.search_runs([experiment.experiment_id])}
    assert ended == {name: "KILLED" if name == "gone" else "RUNNING" for name in places}


def test_runs_of_another_team_are_not_counted_and_their_experiments_not_touched(tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    for number in range(2):
        make_run(tmp_path / "theirs", uri, number, experiment="theirs")
        make_run(tmp_path / "beside", uri, number, model="draft-beside")
    for number in range(2):
        make_run(tmp_path / "own", uri, number)
    assert remove_old_tracking(uri, EXPERIMENTS, keep_runs=2, keep_checkpoints=2) == (0, 0)
    assert remove_old_tracking(uri, ["missing"], keep_runs=0, keep_checkpoints=0) == (0, 0)
    assert remove_old_tracking(uri, EXPERIMENTS, keep_runs=1, keep_checkpoints=1)[0] == 2
    client = connect(uri)
    theirs = client.get_experiment_by_name("theirs")
    assert theirs
    assert len(client.search_runs([theirs.experiment_id])) == 2


def test_experiments_are_noted_once(tmp_path: Path) -> None:
    assert noted_experiments(tmp_path) == []
    for name in ("one", "/users/größe", "one"):
        note_experiment(tmp_path, name)
    assert sorted(noted_experiments(tmp_path)) == ["/users/größe", "one"]


def test_the_trash_is_emptied_where_the_server_proxies_artifacts(tmp_path: Path, database: Path) -> None:
    """`gc` needs the server for the artifacts and the database for the rows."""
    uri = f"sqlite:///{database}"
    client = connect(uri)
    experiment = client.create_experiment("proxied", artifact_location="mlflow-artifacts:/1")
    client.delete_run(client.create_run(experiment).info.run_id)
    with artifact_server() as server:
        empty_trash(server, uri, days=0)
    with sqlite3.connect(database) as connection:
        assert connection.execute("select count(*) from runs").fetchone() == (0,)
