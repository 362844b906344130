"""What a person edited in MLflow's page is told, and stops no other draft."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.refusal import Refusal
from infra.tracking import registry, runs
from infra.tracking.changes import CHANGE, EXPECTED, State
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService
from infra.tracking.retention import remove_old_tracking

EDITED, OTHER = "draft-a", "draft-b"


@pytest.fixture
def client(registry_uri: str, tmp_path: Path) -> MlflowClient:
    """Two drafts, of which each has a champion that replaced another version."""
    run = runs.start_run(tmp_path / "tracking.json", registry_uri, "test", "run", {"name": "q"}, {})
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_text("weights")
    model = runs.log_folder(run, tmp_path / "export", "draft", 1, "draft")
    for name in (EDITED, OTHER):
        for number in (1, 2):
            tags = {registry.RUN: f"{name}-{number}", registry.ACCEPTANCE: "2.5"}
            registry.register(registry_uri, name, model, run.run_id, tags)
            DraftInService(registry_uri, name).promote(number, by="ada", reason="better")
    return connect(registry_uri)


def test_an_edited_number_is_none(client: MlflowClient) -> None:
    uri = client.tracking_uri
    for text in ("2.00 (my note)", "nan", ""):
        client.set_model_version_tag(EDITED, "2", registry.ACCEPTANCE, text)
        lengths = {(one.name, one.version): one.acceptance_length for one in registry.list_drafts(uri)}
        assert lengths == {(EDITED, 2): None, (EDITED, 1): 2.5, (OTHER, 2): 2.5, (OTHER, 1): 2.5}
        serves = registry.champion(uri, EDITED)
        assert serves is not None
        assert serves.tags[registry.ACCEPTANCE] == text
    client.set_model_version_tag(EDITED, "2", registry.REPLACES, "v1")
    assert remove_old_tracking(uri, ["test"], keep_runs=30, keep_checkpoints=3) == (0, 0)
    assert DraftInService(uri, EDITED).rollback(by="ada", reason="slow") == 2
    assert registry.champion(uri, EDITED) is None


def test_an_edited_note_of_the_champion_is_replaced_by_the_history(client: MlflowClient) -> None:
    client.set_registered_model_tag(EDITED, EXPECTED, "v2")
    assert DraftInService(client.tracking_uri, EDITED).reconcile() is None
    assert len(registry.history(client.tracking_uri, EDITED)) == 2
    DraftInService(client.tracking_uri, EDITED).promote(1, by="ada", reason="back")
    assert State.read(client, EDITED) == State(1, None, None, 1)


def test_an_edited_change_is_refused_with_its_place_and_the_remedy(client: MlflowClient) -> None:
    client.set_registered_model_tag(EDITED, CHANGE, "{}")
    acts: list[Callable[[DraftInService], object]] = [
        lambda service: service.reconcile(),
        lambda service: service.promote(1, by="ada", reason="x"),
        lambda service: service.rollback(by="ada", reason="x"),
    ]
    for act in acts:
        with pytest.raises(Refusal, match=rf"{EDITED}: the tag {CHANGE} .*delete it in MLflow"):
            act(DraftInService(client.tracking_uri, EDITED))
        act(DraftInService(client.tracking_uri, OTHER))


def test_an_edited_decision_is_shown_and_decides_nothing(client: MlflowClient) -> None:
    uri = client.tracking_uri
    (tag,) = [tag for tag in client.get_model_version(EDITED, "1").tags if tag.startswith(registry.DECISION)]
    first = registry.history(uri, EDITED)[0]
    client.set_model_version_tag(EDITED, "1", tag, "looked at")
    shown = registry.history(uri, EDITED)
    assert [(one.version, one.outcome) for one in shown] == [(1, "unreadable"), (2, "promoted")]
    assert shown[0].at == pytest.approx(first.at, abs=0.001)
    assert "looked at" in shown[0].reason
    with pytest.raises(Refusal, match=rf"version 1 of {EDITED}: the tag {tag} .*delete it in MLflow"):
        DraftInService(uri, EDITED).promote(1, by="ada", reason="back")
    DraftInService(uri, OTHER).promote(1, by="ada", reason="back")
