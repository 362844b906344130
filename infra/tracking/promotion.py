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
from collections.abc import Iterator
from typing import Literal
from uuid import UUID, uuid4, uuid5

from mlflow.entities.model_registry import ModelVersion

from infra.processes.process import ProcessFailedError
from infra.records.acceptance import GateDecision, RegisteredDraft, SmokeResult
from infra.refusal import Refusal
from infra.tracking.changes import CHANGE, EXPECTED, Announce, Announcement, Change, Kind, SmokeTest, State, silent
from infra.tracking.client import connect, model_versions
from infra.tracking.registry import (
    CHALLENGER,
    CHAMPION,
    DECISION,
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


class DraftInService:
    """Which version of one registered model serves, and the changes of that.

    Args:
        smoke_test: tests a version that has become champion; without it, a change that needs one stays recorded.
        announce: hears of every change that took effect.
    """

    def __init__(
        self, uri: str, name: str, *, smoke_test: SmokeTest | None = None, announce: Announce = silent
    ) -> None:
        self._uri, self._name, self._client = uri, name, connect(uri)
        self._smoke_test, self._announce = smoke_test, announce

    def follow_gate(self, draft: RegisteredDraft, gate: GateDecision, *, approval: bool) -> tuple[Step, str]:
        """Promote or refuse a version as the gate decided, once; returns the step and its reason.

        `ask` and `leave` change nothing: a person is to be asked, or the version was decided on before.
        """
        step, reason = self.next_step(draft, gate, approval=approval)
        if step == "promote":
            run, over = draft.tags.get(RUN, ""), draft.tags.get(MEASURED_AGAINST, "")
            self.promote(draft.version, by=BY_GATE, reason=reason, run=run, over=over)
        elif step == "refuse":
            self.refuse(draft.version, by=BY_GATE, reason=reason)
        return step, reason

    def next_step(self, draft: RegisteredDraft, gate: GateDecision, *, approval: bool) -> tuple[Step, str]:
        """What to do with a version, and why. A promotion that this version's run began is always completed."""
        state = self._state()
        if state.change and state.change.version == draft.version:
            mine = state.change.run == draft.tags.get(RUN)
            return ("promote", gate.reason) if mine else ("leave", f"{state.change.by} decided on it")
        if any(decision.version == draft.version for decision in self._decisions()):
            return "leave", "it was decided on before"
        if state.challenger != draft.version:
            return "leave", f"it is not the {CHALLENGER} any more"
        if not gate.passed:
            return "refuse", gate.reason
        now, then = "" if state.champion is None else str(state.champion), draft.tags.get(MEASURED_AGAINST, "")
        if now != then:
            compared = f"version {then}" if then else "no draft"
            present = f"version {now}" if now else "none"
            return "refuse", f"it was compared with {compared}, and {present} is champion now: retrain"
        return ("ask", "it waits for approval") if approval else ("promote", gate.reason)

    def promote(self, version: int, *, by: str, reason: str, run: str = "", over: str | None = None) -> RegisteredDraft:
        """Make a version the champion; one that fails the smoke test gives way to the champion before it.

        `over`: the only champion that it may replace, empty for none; where it is None, any.

        Repeated by the same run, or by the same person for the same reason, this completes what was interrupted, and
        does nothing where nothing was. The version returned is not the champion where its smoke test failed, where
        another one than `over` serves, or where another decision was made at the same moment. Raises what the smoke
        test raises: ProcessFailedError once the version is withdrawn, any other error with the change still recorded.
        """
        self._change("promotion", version, by=by, reason=reason, run=run, over=over)
        return find_version(self._uri, self._name, version)

    def withdraw(self, version: int, *, by: str, reason: str) -> RegisteredDraft | None:
        """Take a version out of service; returns the champion, the one that it had replaced if there is one.

        Where another version has become champion since, only the decision is recorded.
        """
        self._change("withdrawal", version, by=by, reason=reason)
        return champion(self._uri, self._name)

    def rollback(self, *, by: str, reason: str) -> int:
        """Take the champion out of service, or complete a withdrawal that was interrupted; returns the version.

        Raises Refusal where there is no champion.
        """
        state = self._state()
        if state.change and state.change.kind == "withdrawal":
            self.resume()
            return state.change.version
        if state.champion is None:
            raise Refusal(f"{self._name} has no champion to roll back: `draftsmith drafts list` shows what there is")
        self.withdraw(state.champion, by=by, reason=reason)
        return state.champion

    def refuse(self, version: int, *, by: str, reason: str) -> RegisteredDraft:
        """Record who refused a version and why; no alias moves. Again for the same reason, it changes nothing."""
        reason = reason[:LONGEST]
        self._client.set_model_version_tag(self._name, str(version), REFUSED, reason)
        made = [one for one in self._decisions() if one.version == version]
        if not made or (made[-1].outcome, made[-1].by, made[-1].reason) != ("refused", by, reason):
            present, at = self._state().champion, self._now()
            refusal = PromotionDecision(
                at=at, version=version, outcome="refused", champion_before=present, champion_after=present, by=by,
                reason=reason,
            )  # fmt: skip
            write_decision(self._client, self._name, refusal, f"{at * 1000:.0f}.refused")
        return find_version(self._uri, self._name, version)

    def reconcile(self) -> Change | None:
        """Complete an interrupted change, or one that was made outside Draftsmith by moving the alias.

        Returns the change where it waits for a smoke test and none is given.
        """
        self._notice()
        return self.resume()

    def resume(self) -> Change | None:
        """Complete the change in progress; returns it if it needs a smoke test and none is given."""
        change = self._state().change
        return self._complete(change.id) if change else None

    def _complete(self, change_id: str) -> Change | None:
        """The same for this change only, whatever else is recorded meanwhile."""
        while True:
            state = self._state()
            change = state.change
            if change is None or change.id != change_id:
                return None
            if change.stage == "intended":
                following = self._move(change, state)
            elif change.stage == "settled":
                self._announce(self._announcement(change))
                following = None
            elif state.champion != change.version:  # moved since: nothing is left to be tested
                following = None
            elif self._smoke_test is None:
                return change
            else:
                following = self._test(change, self._smoke_test)
            self._record(following, over=change)

    def _change(
        self, kind: Kind, version: int, *, by: str, reason: str, run: str = "", over: str | None = None
    ) -> None:
        """Record a change, unless it is under way or done already, and complete it."""
        find_version(self._uri, self._name, version)
        wanted = Change(id=str(uuid4()), kind=kind, version=version, by=by, reason=reason[:LONGEST], run=run)
        current = self._notice()
        if current and wanted.repeats(current):
            wanted = current
        else:
            if self._is_done(wanted):
                return
            if current:
                self._overtake(wanted)
            state = self._state()
            after = version if kind == "promotion" else state.champion
            if kind == "withdrawal" and state.champion == version:
                after = self._replaced(version)
            before = state.champion if over is None else int(over or 0) or None
            tested = kind == "promotion" and self._smoke_test is not None
            known = {"at": self._now(), "before": before, "after": after, "tested": tested}
            self._record(wanted := wanted.model_copy(update=known))
        self._complete(wanted.id)
        if DECISION + _key(wanted) not in self._client.get_model_version(self._name, str(version)).tags:
            # Who decided at the same moment had read that there is no change, and recorded another one over this.
            self._supersede(wanted, self._state(), "another decision was made at the same moment, and took its place")

    def _notice(self) -> Change | None:
        """Record a change for a champion alias that is not where the history left it; returns the change under way.

        The recorded change takes the steps of every other: history, smoke test, event.
        """
        state = self._state()
        expected = state.expected if state.is_noted else self._last_champion()
        # A registry may hold models that Draftsmith did not register.
        if state.change or state.champion == expected or not any(MODEL_ID in one.tags for one in self._versions()):
            return state.change
        if (again := self._state()) != state:  # a change began and ended between the two requests
            return again.change
        reason = f"the alias {CHAMPION} was moved from {_in_words(expected)} to {_in_words(state.champion)}"
        if state.champion is None and expected is not None and not self._exists(expected):
            reason = f"version {expected} was deleted while it was champion"
        kind, version = ("withdrawal", expected) if state.champion is None else ("promotion", state.champion)
        assert version is not None
        change = Change(
            id=str(uuid4()), at=self._now(), kind=kind, version=version, before=expected, after=state.champion,
            by=OUTSIDE, reason=reason, tested=kind == "promotion",
        )  # fmt: skip
        self._record(change)
        return change

    def _last_champion(self) -> int | None:
        """The champion that the history left."""
        moves = [one for one in self._decisions() if one.outcome in ("promoted", "rolled back")]
        return moves[-1].champion_after if moves else None

    def _is_done(self, wanted: Change) -> bool:
        """Whether the history shows that this very change was completed."""
        made = self._decisions()
        if wanted.run:
            return any((one.run, one.version) == (wanted.run, wanted.version) for one in made)
        present = self._state().champion
        if wanted.kind == "promotion":
            made = [one for one in made if one.outcome in ("promoted", "rolled back")]
            outcome, in_effect = "promoted", present == wanted.version
        else:
            made = [one for one in made if one.version == wanted.version]
            outcome, in_effect = "rolled back", present != wanted.version
        last = (made[-1].version, made[-1].outcome, made[-1].by, made[-1].reason) if made else None
        return in_effect and last == (wanted.version, outcome, wanted.by, wanted.reason)

    def _overtake(self, newer: Change) -> None:
        """Complete the change under way, but for its smoke test, so that `newer` may replace it."""
        state = self._state()
        change = state.change
        if change is None:
            return
        if not change.tested or change.kind == "withdrawal" or change.stage == "settled":
            self.resume()
        elif change.stage == "intended" and state.champion == change.version:
            self._move(change, state)
        elif change.stage == "intended":
            why = f"{newer.by} decided on a {newer.kind} of version {newer.version} before it was champion"
            self._supersede(change, state, why)

    def _move(self, change: Change, state: State) -> Change | None:
        """Move the alias as intended and write the history; returns what is to be recorded next."""
        client, name, version = self._client, self._name, str(change.version)
        if change.kind == "withdrawal":
            if change.before == change.version and state.champion == change.version:
                if change.after is None:
                    client.delete_registered_model_alias(name, CHAMPION)
                else:
                    client.set_registered_model_alias(name, CHAMPION, str(change.after))
            else:  # another version has become champion, or this is repeated
                change = change.model_copy(update={"after": state.champion})
            if not self._is_gone(change) and REPLACES in client.get_model_version(name, version).tags:
                client.delete_model_version_tag(name, version, REPLACES)
            self._write_history(change, "rolled back")
            return change.model_copy(update={"stage": "settled"})
        if state.champion not in (change.before, change.after):
            moved = f"the alias {CHAMPION} was moved to {_in_words(state.champion)} before it was champion"
            self._supersede(change, state, moved)
            return None
        if change.before != change.version:
            client.set_model_version_tag(name, version, REPLACES, "" if change.before is None else str(change.before))
        if state.champion != change.version:
            if self._state() != state:
                return change  # to be looked at again
            client.set_registered_model_alias(name, CHAMPION, version)
        if state.challenger == change.version:
            client.delete_registered_model_alias(name, CHALLENGER)
        self._write_history(change, "promoted")
        return change.model_copy(update={"stage": "moved" if change.tested else "settled"})

    def _test(self, change: Change, smoke_test: SmokeTest) -> Change:
        """Run the smoke test and keep its outcome with the version; returns what is to be recorded next.

        A process that ended with an error counts as a failed test. Any other error, such as expired credentials, says
        nothing about the draft: the change stays recorded, and whoever resumes it tests again.
        """
        draft = find_version(self._uri, self._name, change.version)
        try:
            outcome = smoke_test(draft)
        except ProcessFailedError as error:
            failed = SmokeResult(passed=False, reason=str(error))
            self._record(self._tested(change, failed), over=change)
            self._complete(change.id)
            raise
        return self._tested(change, outcome)

    def _tested(self, change: Change, outcome: SmokeResult) -> Change:
        """Keep the outcome of the smoke test; returns the change that follows from it."""
        text = f"{'passed' if outcome.passed else 'failed'}: {outcome.reason}"
        self._client.set_model_version_tag(self._name, str(change.version), SMOKE_TEST, text[:LONGEST])
        if outcome.passed:
            return change.model_copy(update={"stage": "settled"})
        return Change(
            id=change.id, at=self._now(), kind="withdrawal", version=change.version, before=change.version,
            after=self._replaced(change.version), by=BY_SMOKE_TEST, reason=outcome.reason[:LONGEST], run=change.run,
            tested=change.tested,
        )  # fmt: skip

    def _record(self, change: Change | None, over: Change | None = None) -> None:
        """Record the change in progress, or that there is none. A record other than `over` is left unchanged, unless it
        is that of a rival which has to give way."""
        state = self._state()
        is_other = over is not None and (state.change is None or state.change.id != over.id)
        if over and is_other and not (change and over.stage == "intended" and state.is_due(change)):
            return
        if change is None:
            self._client.delete_registered_model_tag(self._name, CHANGE)
        else:
            self._client.set_registered_model_tag(self._name, CHANGE, change.model_dump_json())

    def _supersede(self, change: Change, state: State, why: str) -> None:
        self._write_history(change.model_copy(update={"reason": why, "after": state.champion}), "superseded")

    def _write_history(self, change: Change, outcome: Outcome) -> None:
        decision = PromotionDecision(
            at=change.at, version=change.version, outcome=outcome, champion_before=change.before,
            champion_after=change.after, by=change.by, reason=change.reason, run=change.run,
        )  # fmt: skip
        if outcome in ("promoted", "rolled back"):
            # With the model, because decisions go with their versions, which may be deleted.
            self._client.set_registered_model_tag(self._name, EXPECTED, str(change.after or ""))
        if self._is_gone(change):  # and its part of the history with it
            return
        # The same key whenever this change is resumed: its decision is in the history once.
        write_decision(self._client, self._name, decision, _key(change))

    def _state(self) -> State:
        return State.read(self._client, self._name)

    def _decisions(self) -> list[PromotionDecision]:
        return decisions(self._client, self._name)

    def _versions(self) -> Iterator[ModelVersion]:
        return model_versions(self._client, self._name)

    def _now(self) -> float:
        """Seconds since 1970, but after every decision made, whatever the clocks of their machines said."""
        made = self._decisions()
        return max(time.time(), made[-1].at + 0.001) if made else time.time()

    def _replaced(self, version: int) -> int | None:
        """The previous champion; None if there was none or it was deleted."""
        versions = {str(one.version): one for one in self._versions()}
        replaced = versions[str(version)].tags.get(REPLACES, "")
        return int(replaced) if replaced in versions else None

    def _exists(self, version: int) -> bool:
        """Whether nobody has deleted this version."""
        return any(int(one.version) == version for one in self._versions())

    def _is_gone(self, change: Change) -> bool:
        """Whether this is the withdrawal of a champion that was deleted in MLflow."""
        return change.by == OUTSIDE and change.kind == "withdrawal" and not self._exists(change.version)

    def _announcement(self, change: Change) -> Announcement:
        def source(version: int | None) -> str | None:
            if version is None or (version == change.version and self._is_gone(change)):
                return None
            return self._client.get_model_version_download_uri(self._name, str(version))

        return Announcement(
            id=str(uuid5(UUID(change.id), change.kind)), kind=change.kind, draft=self._name, version=change.version,
            previous_version=change.before, now=change.after, run=change.run, by=change.by, reason=change.reason,
            source=source(change.version) or "", now_source=source(change.after),
        )  # fmt: skip


def _key(change: Change) -> str:
    return f"{change.at * 1000:.0f}.{change.id[:8]}"


def _in_words(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
