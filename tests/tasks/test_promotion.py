"""What is done with a registered version: the gate's word, once, and only against the champion that it met."""

from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.schemas.objects import StateType
from prefect.testing.utilities import prefect_test_harness

from flows.promote_draft import promote
from infra.files.run_folder import RunFolder
from infra.records.acceptance import BenchmarkResult, GateDecision, RegisteredDraft
from infra.tracking import registry
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService
from infra.tracking.runs import TrackedRun
from tasks.events import UNPROVEN
from tasks.promotion import NOT_PROMOTED, Approval, ended, tell_unproven
from tasks.run import FLOW_RUN

REASON = "worse than version 3"


@pytest.fixture
def failed(result: BenchmarkResult) -> GateDecision:
    return result.gate.model_copy(update={"passed": False, "reason": REASON})


def aliased(alias: str) -> RegisteredDraft:
    return RegisteredDraft(name="draft-tiny", version=2, model_id="m", aliases=(alias,))


def test_a_run_whose_draft_does_not_serve_is_told_from_others(result: BenchmarkResult, failed: GateDecision) -> None:
    assert ended("/runs/tiny-1", aliased(registry.CHAMPION), result.gate) == "/runs/tiny-1"
    for gate, said in ((failed, f"The gate is not passed ({REASON})"), (result.gate, "waits for approval")):
        state: Any = ended("/runs/tiny-1", aliased(registry.CHALLENGER), gate)
        assert (state.type, state.name, state.data) == (StateType.COMPLETED, NOT_PROMOTED, "/runs/tiny-1")
        assert said in state.message


def test_a_resumed_run_says_that_a_version_is_ahead_once(failed: GateDecision, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[tuple[str, Any, UUID]] = []

    def emit(event: str, _resource: Any, *, payload: Any, id: UUID) -> None:
        emitted.append((event, payload, id))

    monkeypatch.setattr("tasks.events.emit_event", emit)
    for run in ("live-1", "live-1", "live-2"):
        tell_unproven(run, aliased(registry.CHALLENGER), failed)
    assert {(event, said["version"], said["reason"]) for event, said, _ in emitted} == {(UNPROVEN, 2, REASON)}
    first, again, other = (id for _, _, id in emitted)
    assert first == again != other


@pytest.mark.slow
def test_prefect_hands_the_folder_to_the_caller(failed: GateDecision) -> None:
    @flow
    def run() -> str:
        return ended("/runs/tiny-1", aliased(registry.CHALLENGER), failed)

    with prefect_test_harness(server_startup_timeout=120):
        state = run(return_state=True)
        assert (state.type, state.name) == (StateType.COMPLETED, NOT_PROMOTED)
        assert run() == "/runs/tiny-1"


@pytest.mark.slow
def test_a_promotion_that_was_answered_does_not_ask_again(
    tracking: TrackedRun, draft: RegisteredDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `recover` starts it again where its flow died after the answer."""
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    form = Approval.with_initial_data(version=draft.version)
    form(version=draft.version, decision="reject", name="Ada", reason="not yet").keep(
        RunFolder(tmp_path / "runs" / "asked")
    )
    with prefect_test_harness(server_startup_timeout=120):
        assert promote(draft.name, tracking_uri=tracking.uri, run="asked").endswith("is not promoted")
    (decision,) = registry.history(tracking.uri, draft.name)
    assert (decision.outcome, decision.by, decision.reason) == ("refused", "Ada", "not yet")


def test_a_retry_of_a_promotion_finds_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's "Retry" names no run: the folder is known by its flow run."""
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    assert Approval.of_run(None) is None, "outside a flow run"
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "one-of-prefect")
    assert Approval.of_run(None) is None
    folder = tmp_path / "runs" / "asked"
    folder.mkdir(parents=True)
    (folder / FLOW_RUN).write_text("one-of-prefect")
    answer = Approval.with_initial_data(version=3)(version=3, decision="approve", name="Ada", reason="better")
    answer.keep(RunFolder(folder))
    found = Approval.of_run(None)
    assert found is not None
    assert (found.version, found.decision) == (3, "approve")


def again(tracking: TrackedRun, draft: RegisteredDraft) -> RegisteredDraft:
    return registry.find_version(tracking.uri, draft.name, draft.version)


def test_the_gate_decides_once(
    tracking: TrackedRun, draft: RegisteredDraft, result: BenchmarkResult, failed: GateDecision
) -> None:
    step = partial(DraftInService(tracking.uri, draft.name).next_step, draft)
    assert step(result.gate, approval=False) == ("promote", result.gate.reason)
    assert step(result.gate, approval=True)[0] == "ask"
    for approval in (True, False):
        assert step(failed, approval=approval) == ("refuse", REASON)
    DraftInService(tracking.uri, draft.name).refuse(draft.version, by="gate", reason=REASON)
    for gate in (failed, result.gate):
        assert step(gate, approval=False) == ("leave", "it was decided on before")


def test_a_draft_is_not_promoted_over_a_champion_that_it_never_met(
    tracking: TrackedRun, draft: RegisteredDraft, result: BenchmarkResult
) -> None:
    other = registry.register(tracking.uri, draft.name, draft.model_id, tracking.run_id, {})
    service = DraftInService(tracking.uri, draft.name)
    assert service.next_step(again(tracking, draft), result.gate, approval=False)[0] == "leave"
    service.promote(other.version, by="ada", reason="")
    connect(tracking.uri).set_registered_model_alias(draft.name, registry.CHALLENGER, "1")
    assert service.next_step(again(tracking, draft), result.gate, approval=False) == (
        "refuse", "it was compared with no draft, and version 2 is champion now: retrain",
    )  # fmt: skip


def test_a_withdrawn_champion_gives_way_to_the_one_before_unless_somebody_was_faster(
    tracking: TrackedRun, draft: RegisteredDraft
) -> None:
    second, third = (registry.register(tracking.uri, draft.name, draft.model_id, tracking.run_id, {}) for _ in range(2))
    for one in (draft, second):
        DraftInService(tracking.uri, one.name).promote(one.version, by="ada", reason="")
    out = partial(DraftInService(tracking.uri, second.name).withdraw, second.version, by="served traffic")
    now = out(reason="slow")
    assert now
    assert now.version == draft.version
    DraftInService(tracking.uri, third.name).promote(third.version, by="ada", reason="")
    kept = out(reason="slow, still")
    assert kept
    assert kept.version == third.version
