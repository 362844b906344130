"""What follows from the gate's decision about a version: promotion, refusal, or the question to a person."""

from typing import Literal

from infra.records.acceptance import GateDecision, RegisteredDraft
from infra.tracking.changes import Announce, SmokeTest, State
from infra.tracking.client import connect
from infra.tracking.decisions import decisions
from infra.tracking.promotion import promote, refuse
from infra.tracking.registry import CHALLENGER, MEASURED_AGAINST, RUN, champion

GATE = "gate"

Step = Literal["promote", "refuse", "ask", "leave"]


def follow_gate(
    uri: str, draft: RegisteredDraft, gate: GateDecision, *, approval: bool, smoke_test: SmokeTest, announce: Announce
) -> tuple[Step, str]:
    """Promote or refuse a version as the gate decided, once; returns the step and its reason.

    `ask` and `leave` change nothing: a person is to be asked, or the version was decided on before.
    """
    step, reason = next_step(uri, draft, gate, approval=approval)
    if step == "promote":
        run = draft.tags.get(RUN, "")
        promote(
            uri, draft.name, draft.version, by=GATE, reason=reason, run=run, smoke_test=smoke_test, announce=announce
        )
    elif step == "refuse":
        refuse(uri, draft, by=GATE, reason=reason)
    return step, reason


def next_step(uri: str, draft: RegisteredDraft, gate: GateDecision, *, approval: bool) -> tuple[Step, str]:
    """What to do with a version, and why. A promotion that this version's run began is always completed."""
    client = connect(uri)
    state = State.read(client, draft.name)
    if state.change and state.change.version == draft.version:
        mine = state.change.run == draft.tags.get(RUN)
        return ("promote", gate.reason) if mine else ("leave", f"{state.change.by} decided on it")
    if any(decision.version == draft.version for decision in decisions(client, draft.name)):
        return "leave", "it was decided on before"
    if state.challenger != draft.version:
        return "leave", f"it is not the {CHALLENGER} any more"
    if not gate.passed:
        return "refuse", gate.reason
    if why := _superseded(uri, draft):
        return "refuse", why
    return ("ask", "it waits for approval") if approval else ("promote", gate.reason)


def _superseded(uri: str, draft: RegisteredDraft) -> str | None:
    """Why the benchmark of a version is outdated: it was compared with a draft that is not the champion."""
    present = champion(uri, draft.name)
    now, then = str(present.version) if present else "", draft.tags.get(MEASURED_AGAINST, "")
    if now == then:
        return None
    compared = f"version {then}" if then else "no draft"
    return f"it was compared with {compared}, and {f'version {now}' if now else 'none'} is champion now: retrain"
