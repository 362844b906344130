"""Two decisions at the same moment: one takes effect, and the history tells both."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from mlflow import MlflowClient

from infra.records.acceptance import GateDecision
from infra.tracking import registry, runs
from infra.tracking.changes import CHANGE, EXPECTED, Announcement, Change, Kind
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


def rival() -> Change:
    """Another process, which has read that there is no change, decides on version 3."""
    return Change(
        id=str(uuid4()), at=time.time(), kind="promotion", version=3, before=1, after=3, by="bob", reason="his"
    )  # fmt: skip


def before_next(patch: pytest.MonkeyPatch, request: str, act: Callable[[], object], about: str = "") -> None:
    """Let another process act before the next request of this kind, with `about` among its arguments."""
    send, left = getattr(MlflowClient, request), [act]

    def sent(client: MlflowClient, *arguments: str) -> object:
        if left and (not about or about in arguments):
            left.pop()()
        return send(client, *arguments)

    patch.setattr(MlflowClient, request, sent)


def outcomes(uri: str) -> list[tuple[int, str, str]]:
    """All decisions but the first: version, outcome, who."""
    return [(one.version, one.outcome, one.by) for one in registry.history(uri, NAME)[1:]]


def replace_the_next_record(patch: pytest.MonkeyPatch) -> None:
    """The rival records its change right after the next one."""
    theirs = rival()
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
    assert sorted(outcomes(uri)) == sorted([(version, "superseded", "ada"), (3, "promoted", "bob")])
    assert registry.list_drafts(uri, NAME)[0].aliases == ("champion",)


def test_a_gate_promotes_no_draft_over_a_champion_that_it_was_not_compared_with(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MlflowClient(uri, uri).set_model_version_tag(NAME, "2", registry.MEASURED_AGAINST, "1")
    draft, gate = registry.find_version(uri, NAME, 2), GateDecision.model_construct(passed=True, reason="better")
    MlflowClient(uri, uri).set_registered_model_alias(NAME, registry.CHALLENGER, "2")
    theirs = DraftInService(uri, NAME)
    # The first request after the gate's look at the champion.
    before_next(monkeypatch, "get_model_version", lambda: theirs.promote(3, by="bob", reason="his"))
    DraftInService(uri, NAME).follow_gate(draft, gate, approval=False)
    assert sorted(outcomes(uri)) == [(2, "superseded", "gate"), (3, "promoted", "bob")]
    assert registry.find_version(uri, NAME, 3).aliases == ("champion",)


def test_an_alias_that_moves_at_the_last_moment_is_left_where_it_is(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other decision completes the first, as newer ones do, and takes its place."""
    theirs = DraftInService(uri, NAME)
    before_next(
        monkeypatch, "set_model_version_tag", lambda: theirs.promote(3, by="bob", reason="his"), registry.REPLACES
    )
    DraftInService(uri, NAME).promote(2, by="ada", reason="hers")
    assert sorted(outcomes(uri)) == [(2, "promoted", "ada"), (3, "promoted", "bob")]
    assert registry.find_version(uri, NAME, 3).aliases == ("champion",)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_version_that_serves_is_announced_though_its_record_was_replaced(
    uri: str, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    said = list[Announcement]()
    record = partial(MlflowClient(uri, uri).set_registered_model_tag, NAME, CHANGE, rival().model_dump_json())
    before_next(monkeypatch, "set_registered_model_alias", record)
    if resumed:  # the rival finds that the alias has moved, and gives way
        before_next(monkeypatch, "set_registered_model_tag", DraftInService(uri, NAME).resume, EXPECTED)
    DraftInService(uri, NAME, announce=said.append).promote(2, by="ada", reason="hers")
    assert [one.version for one in said] == [2]
    assert DraftInService(uri, NAME).reconcile() is None
    assert outcomes(uri)[-1] == (2, "promoted", "ada")
    assert registry.champion(uri, NAME) == registry.find_version(uri, NAME, 2)


def test_an_alias_that_is_set_while_a_deleted_champion_is_withdrawn_stays(uri: str) -> None:
    service, client = DraftInService(uri, NAME), registry.connect(uri)
    service.promote(2, by="alice", reason="hers")
    client.delete_model_version(NAME, "2")
    service._notice()  # interrupted here
    client.set_registered_model_alias(NAME, registry.CHAMPION, "1")
    service.reconcile()
    assert service.promote(1, by="alice", reason="again").version == 1
