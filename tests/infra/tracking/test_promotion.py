"""Changes of the version in service: interrupted at any call, made beside Draftsmith, or overtaken by another one."""

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import isfunction
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from botocore.exceptions import ClientError
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as TrackingStore

from infra.processes.process import ProcessFailedError
from infra.records.acceptance import GateDecision, RegisteredDraft, SmokeResult
from infra.settings import shared_memory_folder
from infra.tracking import registry, runs
from infra.tracking.changes import EXPECTED, Announcement, SmokeTest, State
from infra.tracking.client import REGISTRY_ERRORS, connect, get_model, pages
from infra.tracking.promotion import OUTSIDE, DraftInService
from infra.tracking.registry import history
from infra.tracking.runs import TrackedRun

PASSED, FAILED = SmokeResult(passed=True, reason="it decodes"), SmokeResult(passed=False, reason="it does not decode")
numbers = count(1)


class InterruptedHere(BaseException):
    """Like a signal: nothing but the outermost caller catches it."""


READS = re.compile(r"\.(get|search|list)_")


@dataclass
class Calls:
    """Counts calls that leave the process, and interrupts one of them, or tells of each that has written."""

    number: int = 0
    depth: int = 0
    at: int | None = None
    written: Callable[[str], None] | None = None

    def through(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.depth:  # part of a call that was counted
                return function(*args, **kwargs)
            self.number += 1
            if self.number == self.at:
                raise InterruptedHere(f"before {name}")
            self.depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self.depth -= 1
            if self.written and not READS.search(name):
                self.written(name)
            return result

        return called


def instrument(patch: pytest.MonkeyPatch, calls: Calls, *classes: type) -> None:
    """Pass every public method of the classes through `calls`."""
    for one in classes:
        methods = {name for name in dir(one) if not name.startswith("_") and isfunction(getattr(one, name))}
        for name in methods:
            patch.setattr(one, name, calls.through(f"{one.__name__}.{name}", getattr(one, name)))


@dataclass
class World:
    """One draft in a registry, with its outside: smoke test and listener."""

    uri: str
    model_id: str
    run_id: str
    name: str
    smoke: SmokeResult = PASSED
    heard: list[Announcement] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)

    def register(self, run: str, against: str = "") -> RegisteredDraft:
        tags = {registry.RUN: run, registry.MEASURED_AGAINST: against}
        return registry.register(self.uri, self.name, self.model_id, self.run_id, tags)

    def hear(self, announcement: Announcement) -> None:
        self.calls.through("announce", self.heard.append)(announcement)

    def smoke_test(self, _draft: RegisteredDraft) -> SmokeResult:
        return self.calls.through("smoke test", lambda: self.smoke)()

    def retrained(self, run: str, gate: GateDecision, *, against: str = "", approval: bool = False) -> None:
        """What a retraining does once its benchmark is done."""
        draft = self.register(run, against)
        self.service(smoke_test=self.smoke_test).follow_gate(draft, gate, approval=approval)

    def service(self, smoke_test: SmokeTest | None = None) -> DraftInService:
        return DraftInService(self.uri, self.name, smoke_test=smoke_test, announce=self.hear)

    def state(self) -> tuple[object, ...]:
        """Aliases, tags, history and events, without times and ids; nothing before the first version."""
        if get_model(connect(self.uri), self.name) is None:
            return ()
        state = State.read(connect(self.uri), self.name)
        drafts = registry.list_drafts(self.uri, self.name)
        tags = [{key: text for key, text in one.tags.items() if not key.startswith("decision.")} for one in drafts]
        made = [one.model_dump(exclude={"at"}) for one in history(self.uri, self.name)]
        heard = list({one.id: one.model_dump(exclude={"id", "draft"}) for one in self.heard}.values())
        return state, tags, made, heard


@pytest.fixture(scope="module")
def logged() -> Iterator[tuple[str, TrackedRun, str]]:
    """A registry in a file, which is in memory for speed, and a model that versions can be made of."""
    with TemporaryDirectory(dir=shared_memory_folder()) as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        yield uri, *log_model(uri, Path(folder))


def log_model(uri: str, folder: Path) -> tuple[TrackedRun, str]:
    runs.start_run(folder / "tracking.json", uri, "test", "run", {}, {})
    run = TrackedRun.read(folder / "tracking.json")
    (folder / "export").mkdir()
    (folder / "export" / "model.safetensors").write_text("weights")
    return run, runs.log_folder(run, folder / "export", "draft", 1, "draft")


@pytest.fixture
def make_world(logged: tuple[str, TrackedRun, str]) -> Callable[[], World]:
    uri, run, model_id = logged
    return lambda: World(uri, model_id, run.run_id, f"draft-{next(numbers)}")


@pytest.fixture
def gate() -> GateDecision:
    return GateDecision(
        ground="held-out prompts", passed=True, against="no draft", challenger=3.5, champion=1.0, difference=2.5,
        lower_bound=2.0, margin=0.01, smallest_detectable=0.1, reason="better", grounds=(),
    )  # fmt: skip


Act = Callable[[World, GateDecision], None]


def first_champion(world: World, gate: GateDecision) -> None:
    world.retrained("run-1", gate)


def champion_replaced(world: World, gate: GateDecision) -> None:
    world.retrained("run-2", gate, against="1")


def gate_refuses(world: World, gate: GateDecision) -> None:
    world.retrained("run-2", gate.model_copy(update={"passed": False, "reason": "worse"}), against="1")


def approved(world: World, gate: GateDecision) -> None:
    world.retrained("run-2", gate, against="1", approval=True)
    world.service(world.smoke_test).promote(2, by="Ada", reason="it is better", run="approval-1")


def rejected(world: World, gate: GateDecision) -> None:
    world.retrained("run-2", gate, against="1", approval=True)
    world.service().refuse(2, by="Ada", reason="not now")


def promoted_by_hand(world: World, _gate: GateDecision) -> None:
    world.service().promote(2, by="ada", reason="because")


def rolled_back(version: int) -> Act:
    def act(world: World, _gate: GateDecision) -> None:
        world.service().withdraw(version, by="ada", reason="slow")

    return act


def moved_outside(world: World, _gate: GateDecision) -> None:
    world.service(world.smoke_test).reconcile()


def nothing(_world: World, _gate: GateDecision) -> None: ...


def one(world: World, gate: GateDecision) -> None:
    world.retrained("run-1", gate)
    world.heard.clear()


def one_and_challenger(world: World, gate: GateDecision) -> None:
    one(world, gate)
    world.register("run-2", "1")


def two(world: World, gate: GateDecision) -> None:
    one(world, gate)
    champion_replaced(world, gate)
    world.heard.clear()


def alias_moved(world: World, gate: GateDecision) -> None:
    one_and_challenger(world, gate)
    connect(world.uri).set_registered_model_alias(world.name, registry.CHAMPION, "2")


def alias_deleted(world: World, gate: GateDecision) -> None:
    one(world, gate)
    connect(world.uri).delete_registered_model_alias(world.name, registry.CHAMPION)


def champion_deleted(world: World, gate: GateDecision) -> None:
    two(world, gate)
    connect(world.uri).delete_model_version(world.name, "2")


SCENARIOS: dict[str, tuple[Act, Act, SmokeResult, int | None]] = {
    # before, the change, what the smoke test says of it, the champion afterwards
    "first champion": (nothing, first_champion, PASSED, 1),
    "first champion fails its smoke test": (nothing, first_champion, FAILED, None),
    "champion replaced": (one, champion_replaced, PASSED, 2),
    "smoke test fails": (one, champion_replaced, FAILED, 1),
    "gate refuses": (one, gate_refuses, PASSED, 1),
    "approved by a person": (one, approved, PASSED, 2),
    "approved, but fails its smoke test": (one, approved, FAILED, 1),
    "rejected by a person": (one, rejected, PASSED, 1),
    "promoted by command": (one_and_challenger, promoted_by_hand, PASSED, 2),
    "rolled back by command": (two, rolled_back(2), PASSED, 1),
    "first champion withdrawn": (one, rolled_back(1), PASSED, None),
    "moved outside": (alias_moved, moved_outside, PASSED, 2),
    "moved outside, but fails its smoke test": (alias_moved, moved_outside, FAILED, 1),
    "alias deleted outside": (alias_deleted, moved_outside, PASSED, None),
    "champion deleted outside": (champion_deleted, moved_outside, PASSED, None),
}


@contextmanager
def counted(world: World, calls: Calls, *classes: type) -> Iterator[None]:
    world.calls = calls
    with pytest.MonkeyPatch.context() as patch:
        instrument(patch, calls, *classes)
        yield
    world.calls = Calls()


def content(world: World) -> sqlite3.Connection:
    """A copy of the registry's database."""
    copy = sqlite3.connect(":memory:")
    with closing(sqlite3.connect(world.uri.removeprefix("sqlite:///"))) as database:
        database.backup(copy)
    return copy


def restore(world: World, copy: sqlite3.Connection) -> None:
    """Give the registry the content of a copy: as good as another draft with the same past, and much faster made."""
    with closing(sqlite3.connect(world.uri.removeprefix("sqlite:///"))) as database:
        copy.backup(database)


def compare_interrupted(scenario: str, gate: GateDecision, make: Callable[[], World], *classes: type) -> list[str]:
    """Resume a scenario from what each of its writes leaves, as after a kill there, and compare; returns the writes.

    Reads change nothing, so no other moment leaves anything else. What was written by then is kept by a copy of the
    database, because writing it anew before each resumption takes twice as long.
    """
    before, change, smoke, champion = SCENARIOS[scenario]
    world = make()
    before(world, gate)
    world.smoke = smoke
    left: list[tuple[str, sqlite3.Connection, list[Announcement]]] = []
    calls = Calls(written=lambda name: left.append((name, content(world), list(world.heard))))
    with counted(world, calls, *classes):
        change(world, gate)
    expected = world.state()
    assert isinstance(expected[0], State)
    assert (expected[0].champion, expected[0].change) == (champion, None)
    for at, (name, copy, heard) in enumerate(left, start=1):
        restore(world, copy)
        world.heard[:] = heard
        assert at == len(left) or world.state() != expected
        change(world, gate)
        assert world.state() == expected, f"killed after write {at}, {name}"
    return [name for name, _, _ in left]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_interrupted_anywhere_it_ends_as_if_undisturbed(
    scenario: str, make_world: Callable[[], World], gate: GateDecision
) -> None:
    names = compare_interrupted(scenario, gate, make_world, SqlAlchemyStore, TrackingStore)
    assert len(names) >= 2, names


def test_a_promotion_of_the_champion_is_a_decision_too(make_world: Callable[[], World], gate: GateDecision) -> None:
    world = make_world()
    one(world, gate)
    again = partial(world.service().promote, 1, by="ada")
    again(reason="it is to stay")
    again(reason="it is to stay")
    assert [(made.outcome, made.by, made.reason) for made in history(world.uri, world.name)] == [
        ("promoted", "gate", "better"), ("promoted", "ada", "it is to stay"),
    ]  # fmt: skip
    (heard,) = world.heard
    assert (heard.kind, heard.version, heard.previous_version, heard.now, heard.by) == ("promotion", 1, 1, 1, "ada")
    assert heard.source.endswith("artifacts") or "models" in heard.source


def test_a_newer_promotion_overtakes_an_interrupted_one(make_world: Callable[[], World], gate: GateDecision) -> None:
    """The run that began the older one finds it decided, and leaves the newer one alone."""
    world = make_world()
    one(world, gate)
    draft = world.register("run-2", "1")
    world.register("run-3", "1")
    with counted(world, Calls(at=1)), pytest.raises(InterruptedHere):
        world.service(world.smoke_test).promote(2, by="gate", reason="better", run="run-2")
    world.service().promote(3, by="ada", reason="now")
    world.service(world.smoke_test).follow_gate(draft, gate, approval=False)
    made = [(one.version, one.outcome, one.champion_before) for one in history(world.uri, world.name)]
    assert made == [(1, "promoted", None), (2, "promoted", 1), (3, "promoted", 2)]
    assert State.read(connect(world.uri), world.name).champion == 3
    assert [(one.kind, one.version) for one in world.heard] == [("promotion", 3)]


def test_an_alias_moved_outside_is_noticed_by_a_rollback(make_world: Callable[[], World], gate: GateDecision) -> None:
    world = make_world()
    alias_moved(world, gate)
    assert world.service().rollback(by="ada", reason="who did that?") == 2
    made = [(one.version, one.outcome, one.by) for one in history(world.uri, world.name)]
    assert made[1:] == [(2, "promoted", OUTSIDE), (2, "rolled back", "ada")]
    assert State.read(connect(world.uri), world.name).champion == 1
    assert [one.kind for one in world.heard] == ["withdrawal"]


@pytest.mark.parametrize("deleted", ["1", "2"])
def test_a_version_that_does_not_serve_may_be_deleted(
    make_world: Callable[[], World], gate: GateDecision, deleted: str
) -> None:
    world = make_world()
    two(world, gate)
    if deleted == "2":
        world.service().withdraw(2, by="ada", reason="slow")
    before = State.read(connect(world.uri), world.name).champion
    world.heard.clear()
    connect(world.uri).delete_model_version(world.name, deleted)
    world.service(world.smoke_test).reconcile()
    assert State.read(connect(world.uri), world.name).champion == before
    assert not world.heard
    assert all(one.by != "outside Draftsmith" for one in history(world.uri, world.name))


def test_the_deletion_of_a_champion_is_told(make_world: Callable[[], World], gate: GateDecision) -> None:
    world = make_world()
    champion_deleted(world, gate)
    world.service(world.smoke_test).reconcile()
    (told,) = world.heard
    assert (told.kind, told.version, told.now, told.by) == ("withdrawal", 2, None, "outside Draftsmith")
    assert told.reason == "version 2 was deleted while it was champion"


def test_an_alias_moved_outside_waits_for_its_smoke_test(make_world: Callable[[], World], gate: GateDecision) -> None:
    world = make_world()
    alias_moved(world, gate)
    waiting = world.service().reconcile()
    assert waiting
    assert (waiting.version, waiting.stage, world.heard) == (2, "moved", [])
    world.smoke = FAILED
    assert world.service(world.smoke_test).reconcile() is None
    assert State.read(connect(world.uri), world.name) == State(1, None, None, 1)


def test_a_smoke_test_whose_process_ends_withdraws_the_version(
    make_world: Callable[[], World], gate: GateDecision
) -> None:
    world = make_world()
    one_and_challenger(world, gate)

    def breaks(_draft: RegisteredDraft) -> SmokeResult:
        raise ProcessFailedError("smoke-test", 1, ["RuntimeError: the weights cannot be read"], Path("smoke-test.log"))

    with pytest.raises(ProcessFailedError, match="cannot be read"):
        world.service(breaks).promote(2, by="ada", reason="", run="x")
    made = history(world.uri, world.name)[-1]
    assert (made.version, made.outcome, made.by) == (2, "rolled back", "smoke test")
    assert "the weights cannot be read" in made.reason
    assert State.read(connect(world.uri), world.name) == State(1, None, None, 1)


def test_a_store_that_is_away_leaves_the_smoke_test_for_later(
    make_world: Callable[[], World], gate: GateDecision
) -> None:
    world = make_world()
    one_and_challenger(world, gate)

    def expired(_draft: RegisteredDraft) -> SmokeResult:
        raise ClientError({"Error": {"Code": "ExpiredToken", "Message": "The token has expired."}}, "GetObject")

    with pytest.raises(REGISTRY_ERRORS, match="ExpiredToken"):
        world.service(expired).promote(2, by="ada", reason="", run="x")
    waiting = world.service().reconcile()
    assert waiting
    assert (waiting.version, waiting.stage) == (2, "moved")
    assert history(world.uri, world.name)[-1].outcome == "promoted"
    assert world.service(world.smoke_test).reconcile() is None
    assert State.read(connect(world.uri), world.name) == State(2, None, None, 2)


def test_clocks_that_jump_back_do_not_reorder_the_history(
    make_world: Callable[[], World], gate: GateDecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    two(world, gate)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 7200)
    world.service().promote(1, by="ada", reason="back")
    assert history(world.uri, world.name)[-1].version == 1
    assert world.service().reconcile() is None
    assert len(history(world.uri, world.name)) == 3


def test_models_of_others_are_left_alone(logged: tuple[str, TrackedRun, str]) -> None:
    uri, run, model_id = logged
    client = connect(uri)
    client.create_registered_model("theirs")
    tags = {"acceptance_length": "n/a", "cost": "low", "replaces": "the old ARIMA"}
    client.create_model_version("theirs", f"models:/{model_id}", run.run_id, tags=tags)
    client.set_registered_model_alias("theirs", registry.CHAMPION, "1")
    assert DraftInService(uri, "theirs").reconcile() is None
    assert history(uri, "theirs") == []
    assert registry.list_drafts(uri, "theirs") == []
    assert "theirs" not in {draft.name for draft in registry.list_drafts(uri)}


def test_the_champion_of_an_earlier_version_keeps_what_it_replaced(make_world: Callable[[], World]) -> None:
    """Such versions noted the champion in the history alone."""
    world = make_world()
    for run in ("first", "second"):
        draft = world.register(run)
        world.service(world.smoke_test).promote(draft.version, by="gate", reason="better", run=run)
    client, before = connect(world.uri), history(world.uri, world.name)
    client.delete_registered_model_tag(world.name, EXPECTED)
    assert world.service().reconcile() is None
    assert history(world.uri, world.name) == before
    world.service().rollback(by="somebody", reason="slower")
    present = registry.champion(world.uri, world.name)
    assert present is not None
    assert present.version == 1


def test_drafts_of_an_earlier_version_are_listed(logged: tuple[str, TrackedRun, str]) -> None:
    """Their registered models have no tag before their next run."""
    uri, run, model_id = logged
    client = connect(uri)
    client.create_registered_model("draft-earlier", description="Drafts of **a target**, made by Draftsmith.")
    client.create_model_version("draft-earlier", f"models:/{model_id}", run.run_id)
    client.create_registered_model("draft-documents", description="Contracts.")
    client.create_model_version("draft-documents", f"models:/{model_id}", run.run_id)
    for name in (None, "draft-earlier"):
        assert "draft-earlier" in {draft.name for draft in registry.list_drafts(uri, name)}
    for name in (None, "draft-documents"):
        assert "draft-documents" not in {draft.name for draft in registry.list_drafts(uri, name)}


def test_more_drafts_than_a_page_are_listed(logged: tuple[str, TrackedRun, str]) -> None:
    uri, run, model_id = logged
    client = connect(uri)
    names = [f"many-{number}" for number in range(101)]
    for name in names:
        client.create_registered_model(name, {registry.MARK: registry.DRAFT})
    registry.register(uri, "many-0", model_id, run.run_id, {})
    client.create_registered_model("made-by-hand")
    registry.register(uri, "made-by-hand", model_id, run.run_id, {})
    found = [str(one.name) for one in pages(client.search_registered_models, filter_string="name LIKE 'many-%'")]
    assert sorted(found) == sorted(names)
    assert {"many-0", "made-by-hand"} <= {draft.name for draft in registry.list_drafts(uri)}
