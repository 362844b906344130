"""A draft's way into service and out of it, by the deployments of prefect.yaml: approval, smoke test, rollback."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.acceptance import GateEvidence, RegisteredDraft
from infra.records.data_path import TargetRecord
from infra.tracking import registry, runs
from infra.tracking.changes import State
from infra.tracking.client import connect
from infra.tracking.registry import history
from infra.tracking.runs import TrackedRun
from models.config.recipe import load_recipe
from tasks.events import DEGRADED, WAITING

ROOT = Path(__file__).parents[2]
DRAFT = "draft-approved"
SMALL = [
    "data.max_tokens=64",
    "training.max_steps=120",
    "training.samples_per_step=4",
    "training.log_steps=20",
    "benchmark.prompts=12",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=40",
    "benchmark.timed_tokens=16",
    f"tracking.registered_model={DRAFT}",
    "promotion.approval=true",
    "promotion.traffic.sampling=greedy",
    "promotion.smoke_prompts=4",
]
RESOURCE = {"prefect.resource.id": DRAFT}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A fixed suite of prompts."""
    texts = ("The list type is a mutable", "Modules are imported once and", "A class is made by the", "Sets hold no")
    path = tmp_path / "suite.txt"
    path.write_text("\n\n".join(f"{text} sequence of names that the interpreter looks up in turn" for text in texts))
    return path


@pytest.fixture
def start(stack: Any) -> Callable[..., str]:
    """Submits a deployment; the flow run's id."""

    def submit(flow: str, **parameters: object) -> str:
        deployed = stack.get(f"deployments/name/{flow}/{flow}")
        return stack.post(f"deployments/{deployed['id']}/create_flow_run", {"parameters": parameters})["id"]

    return submit


def completed(stack: Any, flow_run: str) -> None:
    found = stack.wait_for(flow_run)
    assert found["state"]["type"] == "COMPLETED", found["state"]["message"] + stack.log()


def tracked(stack: Any) -> TrackedRun:
    return TrackedRun.read(stack.runs / "approved" / "tracking.json")


def champion(stack: Any) -> RegisteredDraft | None:
    return registry.champion(tracked(stack).uri, DRAFT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_approved_proven_and_withdrawn(
    stack: Any, start: Callable[..., str], until: Callable[..., None], suite: Path, tiny_target: TargetRecord
) -> None:
    settings = [*SMALL, f'promotion.suites={{"fixed": "{suite}"}}']
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", settings)
    write_atomically(RunFolder(stack.runs / "approved").config, recipe)  # a name is that of a run to resume
    config = recipe.model_dump(mode="json")
    with stack.worker(), stack.worker("draftsmith-recovery"):
        completed(stack, start("retrain", config=config, run="approved"))
        evidence = GateEvidence.read(RunFolder(stack.runs / "approved").gate)
        assert [(ground.name, len(ground.challenger)) for ground in evidence.grounds] == [
            ("held-out prompts", 12), ("fixed", 4),
        ]  # fmt: skip
        assert champion(stack) is None, "nobody has approved it"
        approve(stack, start, until)
        nightly(stack, start)
        refuse_broken(stack, start)
        choose_broken_by_hand(stack, start, until)
        withdraw(stack, until)
        choose_by_hand(stack, start, until)


def approve(stack: Any, start: Callable[..., str], until: Callable[..., None]) -> None:
    """The run that asks was submitted by the retraining; it waits without a process until a person answers."""
    (asking,) = stack.flow_runs("promote")
    shown = stack.wait_for(asking, "PAUSED")
    assert shown["state"]["name"] == "Suspended"
    (artifact,) = stack.post("artifacts/filter", {"flow_runs": {"id": {"any_": [asking]}}})
    assert f"Shall version 1 of {DRAFT} serve?" in artifact["data"]
    assert "required" in str(stack.post(f"flow_runs/{asking}/resume", {"run_input": {"version": 1}}))
    answer = {"version": 1, "decision": "approve", "name": "Ada", "reason": "it is better"}
    assert stack.post(f"flow_runs/{asking}/resume", {"run_input": answer | {"decision": "maybe"}})["status"] == "REJECT"
    assert stack.post(f"flow_runs/{asking}/resume", {"run_input": answer})["status"] == "ACCEPT"
    completed(stack, asking)
    serving = champion(stack)
    assert serving
    assert serving.tags[registry.SMOKE_TEST].startswith("passed: acceptance length")
    (decision,) = history(tracked(stack).uri, DRAFT)
    assert (decision.outcome, decision.by, decision.reason) == ("promoted", "Ada", "it is better")
    # As `recover` starts it again where its flow has died: nobody is asked again, and nothing is done twice.
    completed(stack, start("promote", draft=DRAFT, tracking_uri=tracked(stack).uri, run=decision.run))
    assert history(tracked(stack).uri, DRAFT) == [decision]
    until(lambda: events(stack, "draftsmith.draft.promoted"), "for the event")
    (told,) = events(stack, "draftsmith.draft.promoted")
    payload = told["payload"]
    assert payload.pop("source") == payload.pop("now_source")
    assert payload.pop("links")["flow run"].endswith(asking)
    assert payload == {
        "draft": DRAFT, "version": 1, "model_uri": f"models:/{DRAFT}/1", "previous_version": None, "now": 1,
        "run": decision.run, "by": "Ada", "reason": "it is better",
    }  # fmt: skip
    (waited,) = events(stack, WAITING)
    assert (waited["payload"]["version"], waited["payload"].keys() >= payload.keys() - {"now", "by"}) == (1, True)


def events(stack: Any, name: str) -> list[dict[str, Any]]:
    found = stack.post("events/filter", {"filter": {"event": {"name": [name]}}})["events"]
    return [event for event in found if event["resource"]["prefect.resource.id"] == DRAFT]


def nightly(stack: Any, start: Callable[..., str]) -> None:
    """Measured again under the same conditions, the champion accepts what it did."""
    run = tracked(stack)
    completed(stack, start("benchmark-champion", draft=DRAFT, tracking_uri=run.uri))
    (point,) = connect(run.uri).get_metric_history(run.run_id, "nightly/acceptance_length")
    serving = champion(stack)
    assert serving
    assert point.value == pytest.approx(serving.acceptance_length, abs=1e-4)


def refuse_broken(stack: Any, start: Callable[..., str]) -> None:
    """An export that is not the one that was benchmarked serves for as long as the smoke test takes."""
    run = tracked(stack)
    export = RunFolder(stack.runs / "approved").export
    weights = bytearray((export / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (export / "model.safetensors").write_bytes(weights)
    model = runs.log_folder(run, export, "draft", 1, "draft", layout="sglang")
    tags = registry.find_version(run.uri, DRAFT, 1).tags
    kept = {name: tags[name] for name in (registry.ACCEPTANCE, "target_revision")}
    registry.register(run.uri, DRAFT, model, run.run_id, kept)
    found = stack.wait_for(start("promote", draft=DRAFT, ask=False, reason="in a hurry", tracking_uri=run.uri))
    assert found["state"]["type"] == "FAILED"
    serving = champion(stack)
    assert serving
    assert serving.version == 1
    outcomes = [(one.version, one.outcome, one.by) for one in history(run.uri, DRAFT)]
    assert outcomes[1:] == [(2, "promoted", "whoever started the flow"), (2, "rolled back", "smoke test")]
    assert "are not those that were benchmarked" in history(run.uri, DRAFT)[-1].reason


def moved_by_hand(
    stack: Any, start: Callable[..., str], until: Callable[..., None], version: int
) -> list[tuple[int, str, str]]:
    """Move the alias as MLflow's page does; outcomes of the history rows that `reconcile` adds."""
    uri = tracked(stack).uri
    client, before = connect(uri), len(history(uri, DRAFT))
    client.delete_model_version_tag(DRAFT, str(version), registry.SMOKE_TEST)
    client.set_registered_model_alias(DRAFT, "champion", str(version))
    # Cancelled while one by schedule runs, which may have looked before the alias moved.
    while stack.wait_for(start("reconcile", draft=DRAFT, tracking_uri=uri))["state"]["type"] == "CANCELLED":
        continue
    until(lambda: history(uri, DRAFT)[before:] and State.read(client, DRAFT).change is None, "for the smoke test")
    assert registry.SMOKE_TEST in registry.find_version(uri, DRAFT, version).tags
    return [(one.version, one.outcome, one.by) for one in history(uri, DRAFT)[before:]]


def choose_broken_by_hand(stack: Any, start: Callable[..., str], until: Callable[..., None]) -> None:
    """A champion chosen in MLflow's page that fails its smoke test is withdrawn; the one before serves again."""
    rows = moved_by_hand(stack, start, until, 2)
    assert rows == [(2, "promoted", "outside Draftsmith"), (2, "rolled back", "smoke test")]
    serving = champion(stack)
    assert serving
    assert serving.version == 1


def choose_by_hand(stack: Any, start: Callable[..., str], until: Callable[..., None]) -> None:
    """A champion chosen in MLflow's page serves once it has passed its smoke test, and can be rolled back."""
    assert moved_by_hand(stack, start, until, 1) == [(1, "promoted", "outside Draftsmith")]
    serving = champion(stack)
    assert serving
    assert serving.tags[registry.SMOKE_TEST].startswith("passed")
    completed(stack, start("rollback", draft=DRAFT, reason="not wanted", tracking_uri=tracked(stack).uri))
    assert champion(stack) is None


def withdraw(stack: Any, until: Callable[..., None]) -> None:
    """The event of a version that serves badly takes it out of service, without a person."""
    reason = {"draft": DRAFT, "version": 1, "reason": "it serves badly"}
    occurred = datetime.now(UTC).isoformat()
    event = {"id": str(uuid4()), "occurred": occurred, "event": DEGRADED, "resource": RESOURCE, "payload": reason}
    httpx.post(f"{stack.api}/events", json=[event], timeout=300).raise_for_status()
    uri = tracked(stack).uri
    # The alias moves before the history is written; the change is over when its record is gone.
    until(lambda: champion(stack) is None and State.read(connect(uri), DRAFT).change is None, "for the rollback")
    decision = history(uri, DRAFT)[-1]
    assert (decision.version, decision.outcome, decision.by) == (1, "rolled back", "served traffic")
    assert decision.reason == "it serves badly"
