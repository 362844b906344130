"""`draftsmith drafts` where MLflow denies writing, or was edited by hand, or another decision was faster."""

from pathlib import Path

import pytest
from click.testing import Result
from mlflow import MlflowClient
from mlflow.exceptions import RestException
from typer.testing import CliRunner

from flows.command_line import app
from infra.tracking import registry, runs
from infra.tracking.changes import CHANGE
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService

NAME = "draft-a"


@pytest.fixture
def client(registry_in_memory: str, path_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """Two versions, of which the first serves."""
    uri, folder = registry_in_memory, path_in_memory
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    run = runs.start_run(folder / "tracking.json", uri, "test", "run", {}, {})
    (folder / "export").mkdir()
    model = runs.log_folder(run, folder / "export", "draft", 1, "draft")
    for name in (NAME, "draft-b"):
        for number in (1, 2):
            registry.register(uri, name, model, run.run_id, {registry.RUN: f"{number}", registry.ACCEPTANCE: "2.5"})
        DraftInService(uri, name).promote(1, by="gate", reason="the first")
    return connect(uri)


def drafts(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["drafts", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("command", ["list", "history"])
def test_who_may_only_read_is_shown_the_table(
    client: MlflowClient, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set_registered_model_alias(NAME, registry.CHAMPION, "2")

    def denied(*_arguments: str) -> None:
        raise RestException({"error_code": "PERMISSION_DENIED", "message": "Permission denied"})

    monkeypatch.setattr(MlflowClient, "set_registered_model_tag", denied)
    shown = drafts(command, "--name", NAME)
    assert shown.exit_code == 0
    assert f"{NAME}: " in shown.stderr
    assert "may only read" in shown.stderr
    assert "champion" in shown.stdout or "promoted" in shown.stdout


def test_what_was_edited_in_mlflow_is_shown_beside_the_other_drafts(client: MlflowClient) -> None:
    client.set_registered_model_tag(NAME, CHANGE, "{}")
    client.set_model_version_tag(NAME, "2", registry.ACCEPTANCE, "2 (mine)")
    shown = drafts("list")
    assert shown.exit_code == 0
    assert f"{NAME}: the tag {CHANGE}" in shown.stderr
    assert "2 (mine)" in shown.stdout
    assert "draft-b" in shown.stdout


def test_a_promotion_that_another_one_overtook_is_not_told_as_done(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MlflowClient.set_registered_model_alias

    def overtaken(own: MlflowClient, name: str, alias: str, _version: str) -> None:
        write(own, name, alias, "1")

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", overtaken)
    shown = drafts("promote", "2", "--name", NAME)
    assert shown.exit_code == 1
    assert "is champion" not in shown.stdout
    assert "draftsmith drafts history" in shown.stderr
