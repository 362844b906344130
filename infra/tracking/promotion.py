"""Puts a version of a draft into service and takes it out again, in steps that survive an interruption.

A change is recorded in the registry, as a tag of the registered model, before anything moves. Each later step is chosen
from that record and from the aliases, never from where a process was, and each can be repeated. After a crash, `resume`
therefore ends where the undisturbed change would have ended:

    promotion    intended --alias, history--> moved --smoke test passed--> settled --event--> (no record)
                                              `--smoke test failed--> withdrawal, intended
    withdrawal   intended --alias, history--> settled --event--> (no record)

A draft has one change at a time. A newer one completes what is left of the older one, but for its smoke test, and
takes its place. MLflow has no transaction over tags and aliases: a process notices before every step that the record
is no longer its own, and stops there.
"""

import time
from contextlib import ExitStack
from typing import Literal
from uuid import UUID, uuid4, uuid5

from mlflow import MlflowClient

from infra.records.acceptance import GateDecision, RegisteredDraft, SmokeResult
from infra.refusal import Refusal
from infra.tracking.changes import CHANGE, Announce, Announcement, Change, SmokeTest, State, silent
from infra.tracking.client import connect, model_versions
from infra.tracking.registry import (
    CHALLENGER,
    CHAMPION,
    LONGEST,
    MEASURED_AGAINST,
    MODEL_ID,
    REFUSED,
    REPLACES,
    RUN,
    SMOKE_TEST,
    Outcome,
    PromotionDecision,
    champion,
    decisions,
    find_version,
    write_decision,
)

Step = Literal["promote", "refuse", "ask", "leave"]
BY_GATE = "gate"
BY_SMOKE_TEST = "smoke test"
OUTSIDE = "outside Draftsmith"
"""Who moved an alias without leaving a record."""


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
            uri, draft.name, draft.version, by=BY_GATE, reason=reason, run=run, smoke_test=smoke_test, announce=announce
        )
    elif step == "refuse":
        refuse(uri, draft, by=BY_GATE, reason=reason)
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
    if why := _outdated(uri, draft):
        return "refuse", why
    return ("ask", "it waits for approval") if approval else ("promote", gate.reason)


def _outdated(uri: str, draft: RegisteredDraft) -> str | None:
    """Why the benchmark of a version is outdated: it was compared with a draft that is not the champion."""
    present = champion(uri, draft.name)
    now, then = str(present.version) if present else "", draft.tags.get(MEASURED_AGAINST, "")
    if now == then:
        return None
    compared = f"version {then}" if then else "no draft"
    return f"it was compared with {compared}, and {f'version {now}' if now else 'none'} is champion now: retrain"


def promote(
    uri: str,
    name: str,
    version: int,
    *,
    by: str,
    reason: str,
    run: str = "",
    smoke_test: SmokeTest | None = None,
    announce: Announce = silent,
) -> RegisteredDraft:
    """Make a version the champion; one that fails `smoke_test` gives way to the champion before it.

    Repeated by the same run, or by the same person for the same reason, this completes what was interrupted, and does
    nothing where nothing was. Raises what the smoke test raises, once the version is withdrawn.
    """
    find_version(uri, name, version)
    tested = smoke_test is not None
    wanted = Change(
        id=str(uuid4()), kind="promotion", version=version, by=by, reason=reason[:LONGEST], run=run, tested=tested
    )
    if _begin(uri, name, wanted, announce):
        resume(uri, name, smoke_test=smoke_test, announce=announce)
    return find_version(uri, name, version)


def withdraw(
    uri: str, name: str, version: int, *, by: str, reason: str, announce: Announce = silent
) -> RegisteredDraft | None:
    """Take a version out of service; returns the champion, the one that it had replaced if there is one.

    Where another version has become champion since, only the decision is recorded.
    """
    find_version(uri, name, version)
    wanted = Change(id=str(uuid4()), kind="withdrawal", version=version, by=by, reason=reason[:LONGEST])
    if _begin(uri, name, wanted, announce):
        resume(uri, name, announce=announce)
    return champion(uri, name)


def rollback(uri: str, name: str, *, by: str, reason: str, announce: Announce = silent) -> int:
    """Take the champion out of service, or complete a withdrawal that was interrupted; returns the version withdrawn.

    Raises Refusal where there is no champion.
    """
    state = State.read(connect(uri), name)
    if state.change and state.change.kind == "withdrawal":
        resume(uri, name, announce=announce)
        return state.change.version
    if state.champion is None:
        raise Refusal(f"{name} has no champion to roll back: `draftsmith drafts list` shows what there is")
    withdraw(uri, name, state.champion, by=by, reason=reason, announce=announce)
    return state.champion


def refuse(uri: str, draft: RegisteredDraft, *, by: str, reason: str) -> RegisteredDraft:
    """Record who refused a version and why; no alias moves. Refusing it again for the same reason changes nothing."""
    client, name, reason = connect(uri), draft.name, reason[:LONGEST]
    client.set_model_version_tag(name, str(draft.version), REFUSED, reason)
    made = [one for one in decisions(client, name) if one.version == draft.version]
    if not made or (made[-1].outcome, made[-1].by, made[-1].reason) != ("refused", by, reason):
        present, at = State.read(client, name).champion, _now(client, name)
        refusal = PromotionDecision(
            at=at, version=draft.version, outcome="refused", champion_before=present, champion_after=present, by=by,
            reason=reason,
        )  # fmt: skip
        write_decision(client, name, refusal, f"{at * 1000:.0f}.refused")
    return find_version(uri, name, draft.version)


def reconcile(
    uri: str, name: str, *, smoke_test: SmokeTest | None = None, announce: Announce = silent
) -> Change | None:
    """Complete an interrupted change, or one that was made outside Draftsmith by moving the alias.

    Returns the change where it waits for a smoke test and none is given.
    """
    notice(uri, name)
    return resume(uri, name, smoke_test=smoke_test, announce=announce)


def notice(uri: str, name: str) -> Change | None:
    """Record a change for a champion alias that is not where the history left it; returns the change under way, if any.

    The recorded change takes the steps of every other: history, smoke test, event.
    """
    client = connect(uri)
    state, made = State.read(client, name), decisions(client, name)
    moves = [one for one in made if one.outcome in ("promoted", "rolled back")]
    expected = moves[-1].champion_after if moves else None
    if state.change or state.champion == expected or not _is_ours(client, name):
        return state.change
    if (again := State.read(client, name)) != state:  # a change began and ended between the two requests
        return again.change
    reason = f"the alias {CHAMPION} was moved from {_in_words(expected)} to {_in_words(state.champion)}"
    kind, version = ("withdrawal", expected) if state.champion is None else ("promotion", state.champion)
    assert version is not None
    change = Change(
        id=str(uuid4()), at=_now(client, name), kind=kind, version=version, before=expected, after=state.champion,
        by=OUTSIDE, reason=reason, tested=kind == "promotion",
    )  # fmt: skip
    _record(client, name, change)
    return change


def resume(uri: str, name: str, *, smoke_test: SmokeTest | None = None, announce: Announce = silent) -> Change | None:
    """Complete the change in progress; returns it if it needs a smoke test and none is given."""
    client = connect(uri)
    first = State.read(client, name).change
    while first:
        state = State.read(client, name)
        change = state.change
        if change is None or change.id != first.id:
            return None
        if change.stage == "intended":
            following = _move(client, name, change, state)
        elif change.stage == "settled":
            announce(_announcement(client, name, change))
            following = None
        elif state.champion != change.version:  # moved since: nothing is left to be tested
            following = None
        elif smoke_test is None:
            return change
        else:
            following = _test(uri, name, change, smoke_test, announce)
        _record(client, name, following, over=change)
    return None


def _begin(uri: str, name: str, wanted: Change, announce: Announce) -> bool:
    """Record a change, unless it is under way already; returns whether anything is left to do."""
    client = connect(uri)
    current = notice(uri, name)
    if current and wanted.repeats(current):
        return True
    if _is_done(client, name, wanted):
        return False
    if current:
        _overtake(uri, name, wanted, announce)
    state = State.read(client, name)
    after = wanted.version if wanted.kind == "promotion" else state.champion
    if wanted.kind == "withdrawal" and state.champion == wanted.version:
        after = _replaced(client, name, wanted.version)
    update = {"at": _now(client, name), "before": state.champion, "after": after}
    _record(client, name, wanted.model_copy(update=update))
    return True


def _is_done(client: MlflowClient, name: str, wanted: Change) -> bool:
    """Whether the history shows that this very change was completed."""
    made = decisions(client, name)
    if wanted.run:
        return any((one.run, one.version) == (wanted.run, wanted.version) for one in made)
    present = State.read(client, name).champion
    if wanted.kind == "promotion":
        made = [one for one in made if one.outcome in ("promoted", "rolled back")]
        outcome, in_effect = "promoted", present == wanted.version
    else:
        made = [one for one in made if one.version == wanted.version]
        outcome, in_effect = "rolled back", present != wanted.version
    last = (made[-1].version, made[-1].outcome, made[-1].by, made[-1].reason) if made else None
    return in_effect and last == (wanted.version, outcome, wanted.by, wanted.reason)


def _overtake(uri: str, name: str, newer: Change, announce: Announce) -> None:
    """Complete the change under way, but for its smoke test, so that `newer` may replace it."""
    client = connect(uri)
    state = State.read(client, name)
    change = state.change
    if change is None:
        return
    if not change.tested or change.kind == "withdrawal" or change.stage == "settled":
        resume(uri, name, announce=announce)
    elif change.stage == "intended" and state.champion == change.version:
        _move(client, name, change, state)
    elif change.stage == "intended":
        why = f"{newer.by} decided on a {newer.kind} of version {newer.version} before it was champion"
        _write_history(client, name, change.model_copy(update={"reason": why, "after": state.champion}), "superseded")


def _move(client: MlflowClient, name: str, change: Change, state: State) -> Change | None:
    """Move the alias as intended and write the history; returns what is to be recorded next."""
    version = str(change.version)
    if change.kind == "withdrawal":
        if change.before == change.version and state.champion == change.version:
            _point_champion(client, name, change.after)
        if REPLACES in client.get_model_version(name, version).tags:
            client.delete_model_version_tag(name, version, REPLACES)
        _write_history(client, name, change, "rolled back")
        return change.model_copy(update={"stage": "settled"})
    if state.champion not in (change.before, change.after):
        why = f"the alias {CHAMPION} was moved to {_in_words(state.champion)} before it was champion"
        _write_history(client, name, change.model_copy(update={"reason": why, "after": state.champion}), "superseded")
        return None
    if change.before != change.version:
        client.set_model_version_tag(name, version, REPLACES, "" if change.before is None else str(change.before))
    if state.champion != change.version:
        _point_champion(client, name, change.version)
    if state.challenger == change.version:
        client.delete_registered_model_alias(name, CHALLENGER)
    _write_history(client, name, change, "promoted")
    return change.model_copy(update={"stage": "moved" if change.tested else "settled"})


def _point_champion(client: MlflowClient, name: str, version: int | None) -> None:
    if version is None:
        client.delete_registered_model_alias(name, CHAMPION)
    else:
        client.set_registered_model_alias(name, CHAMPION, str(version))


def _test(uri: str, name: str, change: Change, smoke_test: SmokeTest, announce: Announce) -> Change:
    """Run the smoke test and keep its outcome with the version; returns what is to be recorded next.

    An error counts as a failed test. An interruption (a signal, a cancelled flow) does not: the change stays recorded.
    """
    draft = find_version(uri, name, change.version)

    def withdraw_after(kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if kind is not None and issubclass(kind, Exception):
            outcome = SmokeResult(passed=False, reason=str(error) or kind.__name__)
            _record(connect(uri), name, _tested(uri, name, change, outcome), over=change)
            resume(uri, name, announce=announce)
        return False

    with ExitStack() as stack:
        stack.push(withdraw_after)
        outcome = smoke_test(draft)
    return _tested(uri, name, change, outcome)


def _tested(uri: str, name: str, change: Change, outcome: SmokeResult) -> Change:
    """Keep the outcome of the smoke test; returns the change that follows from it."""
    client, version = connect(uri), change.version
    text = f"{'passed' if outcome.passed else 'failed'}: {outcome.reason}"
    client.set_model_version_tag(name, str(version), SMOKE_TEST, text[:LONGEST])
    if outcome.passed:
        return change.model_copy(update={"stage": "settled"})
    update = {
        "at": _now(client, name),
        "kind": "withdrawal",
        "stage": "intended",
        "before": version,
        "after": _replaced(client, name, version),
        "by": BY_SMOKE_TEST,
        "reason": outcome.reason[:LONGEST],
    }
    return change.model_copy(update=update)


def _record(client: MlflowClient, name: str, change: Change | None, over: Change | None = None) -> None:
    """Record the change in progress, or that there is none. A record other than `over` is left unchanged."""
    if over is not None:
        current = State.read(client, name).change
        if current is None or current.id != over.id:
            return
    if change is None:
        client.delete_registered_model_tag(name, CHANGE)
    else:
        client.set_registered_model_tag(name, CHANGE, change.model_dump_json())


def _write_history(client: MlflowClient, name: str, change: Change, outcome: Outcome) -> None:
    decision = PromotionDecision(
        at=change.at, version=change.version, outcome=outcome, champion_before=change.before,
        champion_after=change.after, by=change.by, reason=change.reason, run=change.run,
    )  # fmt: skip
    # The same key whenever this change is resumed: its decision is in the history once.
    write_decision(client, name, decision, f"{change.at * 1000:.0f}.{change.id[:8]}")


def _now(client: MlflowClient, name: str) -> float:
    """Seconds since 1970, but after every decision made, whatever the clocks of their machines said."""
    made = decisions(client, name)
    return max(time.time(), made[-1].at + 0.001) if made else time.time()


def _replaced(client: MlflowClient, name: str, version: int) -> int | None:
    """The previous champion; None if there was none or it was deleted."""
    versions = {str(one.version): one for one in model_versions(client, name)}
    replaced = versions[str(version)].tags.get(REPLACES, "")
    return int(replaced) if replaced in versions else None


def _is_ours(client: MlflowClient, name: str) -> bool:
    """Whether Draftsmith registered a version of the model: a registry may hold others."""
    return any(MODEL_ID in version.tags for version in model_versions(client, name))


def _announcement(client: MlflowClient, name: str, change: Change) -> Announcement:
    def source(version: int | None) -> str | None:
        return None if version is None else str(client.get_model_version_download_uri(name, str(version)))

    return Announcement(
        id=str(uuid5(UUID(change.id), change.kind)), kind=change.kind, draft=name, version=change.version,
        previous_version=change.before, now=change.after, run=change.run, by=change.by, reason=change.reason,
        source=source(change.version) or "", now_source=source(change.after),
    )  # fmt: skip


def _in_words(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
