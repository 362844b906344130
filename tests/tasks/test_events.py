"""Which draft a flow run is about, and the form of events."""

from pathlib import Path

import pytest

from models.config.recipe import load_recipe
from tasks.events import draft_of, payload

TINY = load_recipe(Path(__file__).parents[2] / "recipes" / "tiny.yaml")


@pytest.mark.parametrize(
    ("parameters", "draft"),
    [
        ({"config": TINY}, "draft-tiny"),
        ({"config": TINY.model_dump(mode="json")}, "draft-tiny"),
        ({"config": {"name": "a", "tracking": {"registered_model": "ours"}}}, "ours"),
        ({"config": {"draft": "draft-x", "servers": []}}, "draft-x"),
        ({"draft": "draft-y", "version": 3}, "draft-y"),
        ({"flow_run": "1"}, ""),
    ],
)
def test_the_draft_of_a_flow_run(parameters: dict, draft: str) -> None:
    assert draft_of(parameters) == draft


def test_every_event_has_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example/x")
    said = payload("draft-x", version=3, reason="fell; postgresql://me:secret@db/x", run="x-1", prompts=2)
    assert said == {
        "draft": "draft-x", "version": 3, "model_uri": "models:/draft-x/3", "previous_version": None,
        "reason": said["reason"], "run": "x-1",
        "links": {"version": "https://mlflow.example/x/#/models/draft-x/versions/3"}, "prompts": 2,
    }  # fmt: skip
    assert "fell" in said["reason"]
    assert "secret" not in str(said)
    assert payload("draft-x").keys() == said.keys() - {"prompts"}
