"""The reconcile flow over a real registry: what is wrong with one draft keeps no other from being completed."""

from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness

from flows.reconcile_drafts import reconcile_drafts
from infra.tracking import registry, runs
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService
from tasks.side_effects import draft_tag


def served_version(uri: str, folder: Path, name: str) -> None:
    """A draft with a champion, whose run logged no recipe."""
    run = runs.start_run(folder / f"{name}.json", uri, "test", name, {}, {})
    export = folder / name
    export.mkdir()
    (export / "model.safetensors").write_text("weights")
    model = runs.log_folder(run, export, "draft", 1, "draft")
    registry.register(uri, name, model, run.run_id, {registry.RUN: name})
    DraftInService(uri, name).promote(1, by="ada", reason="the first")


@pytest.mark.slow
def test_one_faulty_draft_keeps_no_other_of_this_server_from_being_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    for name in ("draft-a", "draft-b", "draft-of-others"):
        served_version(uri, tmp_path, name)
    client = connect(uri)
    # Somebody else made its version the champion; the smoke test needs the recipe, which is not there.
    client.set_registered_model_tag("draft-a", "draftsmith.champion", "")
    for name in ("draft-b", "draft-of-others"):
        client.delete_registered_model_alias(name, registry.CHAMPION)
    with prefect_test_harness(server_startup_timeout=120):
        with get_client(sync_client=True) as prefect:
            for name in ("draft-a", "draft-b"):
                prefect.create_flow_run(reconcile_drafts, tags=[draft_tag(name)])
        with pytest.raises(ValueError, match="draft-a could not be"):
            reconcile_drafts(tracking_uri=uri)
    last = registry.history(uri, "draft-b")[-1]
    assert (last.version, last.outcome, last.by) == (1, "rolled back", "outside Draftsmith")
    assert len(registry.history(uri, "draft-of-others")) == 1, "another installation completes it"
