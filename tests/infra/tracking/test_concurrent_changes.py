"""Two decisions at the same moment: one takes effect, and the history tells both."""

import time
from pathlib import Path
from uuid import uuid4

import pytest
from mlflow import MlflowClient

from infra.tracking import registry, runs
from infra.tracking.changes import CHANGE, Change, Kind
from infra.tracking.promotion import DraftInService

NAME = "draft-a"


@pytest.fixture
def uri(registry_uri: str, tmp_path: Path) -> str:
    """A registry with three versions, of which the first serves."""
    run = runs.start_run(tmp_path / "tracking.json", registry_uri, "test", "run", {}, {})
    (tmp_path / "export").mkdir()
    model = runs.log_folder(run, tmp_path / "export", "draft", 1, "draft")
    for number in (1, 2, 3):
        registry.register(registry_uri, NAME, model, run.run_id, {registry.RUN: f"run-{number}"})
    DraftInService(registry_uri, NAME).promote(1, by="gate", reason="the first")
    return registry_uri


def replace_the_next_record(patch: pytest.MonkeyPatch) -> None:
    """Another process, which has read that there is no change, records its own right after the next one."""
    theirs = Change(
        id=str(uuid4()), at=time.time(), kind="promotion", version=3, before=1, after=3, by="bob", reason="his"
    )  # fmt: skip
    write, left = MlflowClient.set_registered_model_tag, [theirs]

    def written(client: MlflowClient, name: str, key: str, value: str) -> None:
        write(client, name, key, value)
        if key == CHANGE and left:
            write(client, name, key, left.pop().model_dump_json())

    patch.setattr(MlflowClient, "set_registered_model_tag", written)


@pytest.mark.parametrize(("kind", "version"), [("promotion", 2), ("withdrawal", 1)])
def test_a_change_whose_record_was_replaced_is_in_the_history(
    uri: str, kind: Kind, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_the_next_record(monkeypatch)
    service = DraftInService(uri, NAME)
    if kind == "promotion":
        assert "champion" not in service.promote(version, by="ada", reason="hers").aliases
    else:
        service.withdraw(version, by="ada", reason="slow")
    DraftInService(uri, NAME).resume()  # as the other process does
    made = [(one.version, one.outcome, one.by) for one in registry.history(uri, NAME)[1:]]
    assert sorted(made) == sorted([(version, "superseded", "ada"), (3, "promoted", "bob")])
    assert registry.list_drafts(uri, NAME)[0].aliases == ("champion",)
