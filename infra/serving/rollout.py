"""What to do next to bring servers to the registry's version: a function of what was decided and what is seen.

Nothing here starts, stops or asks anything, so that every situation can be tried in a test. The follower writes the
state down before it acts on it; killed at any point, it goes on from the state and from what the servers report.

A version that has not served here before is tried by the first servers, the canaries, while all others keep what they
run. Whatever speaks against it there takes it back, here first and then in the registry.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from infra.records.data_path import Record
from infra.serving.comparison import EARLY_LEVEL, LEVEL, StepGroup, compare_apart
from infra.serving.config import CanaryConfig

NO_DRAFT = 0
"""In place of a version: the target alone. The registry counts from 1."""
FOREIGN = -1
"""In place of a version: the server runs a draft that is none of ours."""
KEEP_PROVEN = 20
MAX_FAILURES = 3
"""Failed starts or probes of canaries after which a version goes back; a server may die of something else, too."""

Value = TypeVar("Value")
Condition = Literal["down", "waiting", "starting", "healthy", "draining"]
"""`waiting`: down, and its next start is not due."""
StartOutcome = Literal["started", "failed", "impossible"]
"""`failed`: its command ended with an error. `impossible`: there was no such command."""


class ProbeAnswer(Record):
    """What a server answered to one prompt."""

    tokens: tuple[int, ...]
    group: StepGroup
    """Counted by the engine; without a draft no steps."""


class ServerProbe(Record):
    """A server's answers to a version's prompts, and how it drafts."""

    lookahead: int | None
    """None: it drafts nothing, trees, or changes its lookahead."""
    answers: tuple[ProbeAnswer, ...]


class Trial(Record):
    """A version on the canaries."""

    version: int
    failures: int = 0
    control: bool = False
    """Whether a server was healthy without this version since the trial began: it can be started."""
    suspended: bool = False
    """No server has started with it, and none is known to start without it: that is tried first."""
    before: ServerProbe | None = None
    """What a server without this version answered to the version's prompts."""
    probed: tuple[str, ...] = ()
    """Addresses of the canaries that answered as expected."""
    compared_since: float | None = None
    """When the canaries' traffic began to count, in seconds since 1970; None until then."""
    compared_s: float = 0.0
    """Seconds for which it was watched since. No clock says that: it may be set, and a machine may sleep."""
    new: tuple[StepGroup, ...] = ()
    old: tuple[StepGroup, ...] = ()
    """Live traffic of canaries and of the other servers in the same time."""

    def with_traffic(self, new: Sequence[StepGroup], old: Sequence[StepGroup], watched_s: float) -> "Trial":
        """With more of it, of the last `watched_s` seconds."""
        more = {"new": (*self.new, *new), "old": (*self.old, *old), "compared_s": self.compared_s + watched_s}
        return self.model_copy(update=more)


class RolloutState(Record):
    """`DRAFT/state.json`: what was decided."""

    target: int
    """What the registry said last: the champion's version, or NO_DRAFT."""
    stable: int
    """What servers run that are not to run the target yet; the target's version when all run it."""
    proven: tuple[int, ...] = ()
    """Versions that held on the canaries, the latest last."""
    trial: Trial | None = None
    taken_back: Mapping[int, str] = {}
    """Why, by version; kept until the registry has heard of it."""
    stopped: Mapping[str, float] = {}
    """When a server was told to stop, in seconds since 1970, by address."""
    started: Mapping[str, int] = {}
    """The version that a server was started with and is not healthy with yet, by address."""
    swapping: tuple[str, ...] = ()
    """Addresses of servers whose weights may be half swapped: they are restarted."""
    not_restarted: tuple[str, ...] = ()
    """Addresses of servers whose last start failed at its command: those that answer may run with earlier arguments."""


@dataclass(frozen=True)
class SeenServer:
    """One server as it is."""

    url: str
    condition: Condition
    version: int = NO_DRAFT
    """What it runs, where it is healthy."""


@dataclass(frozen=True)
class ServerStep:
    """One thing to do with one server."""

    kind: Literal["start", "stop"]
    url: str
    version: int
    """To start with, now or after the stop."""


@dataclass(frozen=True)
class Verdict:
    """On a version under trial."""

    outcome: Literal["wait", "held", "back"]
    reason: str = ""


def in_words(version: int) -> str:
    """For people."""
    return {NO_DRAFT: "no draft", FOREIGN: "a draft that is not of this registry"}.get(version, f"version {version}")


def without(servers: Mapping[str, Value], url: str) -> dict[str, Value]:
    """All but one of them."""
    return {other: value for other, value in servers.items() if other != url}


def starting(state: RolloutState, step: ServerStep) -> RolloutState:
    """The state before a server is started."""
    swapping, not_restarted = (
        tuple(url for url in urls if url != step.url) for urls in (state.swapping, state.not_restarted)
    )
    started = {**state.started, step.url: step.version}
    return state.model_copy(update={"started": started, "swapping": swapping, "not_restarted": not_restarted})


def after_start(state: RolloutState, step: ServerStep, outcome: StartOutcome) -> RolloutState:
    """The state after a server was started, or was not: then the version may be at fault if the server was down."""
    if outcome == "started":
        return state
    counts = outcome == "failed" and step.kind == "start"
    started = state.started if counts else without(state.started, step.url)
    return state.model_copy(update={"started": started, "not_restarted": (*state.not_restarted, step.url)})


def heed(state: RolloutState, told: int) -> RolloutState:
    """The state after the registry has named its champion: a new version is tried, one that has proven itself is not.

    A version that goes back is no target until the registry has heard of it.
    """
    target = state.stable if told in state.taken_back else told
    trial = state.trial if state.trial and state.trial.version == target else None
    if trial is None and target not in (state.stable, NO_DRAFT) and target not in state.proven:
        trial = Trial(version=target)
    return state.model_copy(update={"target": target, "trial": trial})


def with_control(state: RolloutState, seen: Sequence[SeenServer]) -> RolloutState:
    """The state after a server was seen to run without the version under trial, if one was: only from then on a failed
    start is the version's fault."""
    trial = state.trial
    if trial is None or not any(one.condition == "healthy" and one.version != trial.version for one in seen):
        return state
    return state.model_copy(update={"trial": trial.model_copy(update={"control": True, "suspended": False})})


def canaries(servers: int, share: float) -> int:
    """How many of the servers try a version first."""
    return max(1, math.ceil(share * servers - 1e-9))


def wanted_versions(state: RolloutState, servers: int, share: float) -> list[int]:
    """What each server is to run."""
    first = 0 if state.trial and state.trial.suspended else canaries(servers, share)
    return [state.target if state.trial is None or place < first else state.stable for place in range(servers)]


def next_steps(seen: Sequence[SeenServer], wanted: Sequence[int], healthy_others: int) -> list[ServerStep]:
    """What to do now. Every server that is down is started; otherwise one healthy server at a time is replaced."""
    down = [(one, version) for one, version in zip(seen, wanted, strict=True) if one.condition == "down"]
    if down:
        return [ServerStep("start", one.url, version) for one, version in down]
    healthy = sum(one.condition == "healthy" for one in seen)
    if any(one.condition in ("starting", "draining") for one in seen) or healthy - 1 < healthy_others:
        return []
    pairs = zip(seen, wanted, strict=True)
    wrong = [(one, version) for one, version in pairs if one.condition == "healthy" and one.version != version]
    return [ServerStep("stop", one.url, version) for one, version in wrong[:1]]


def judge(trial: Trial, config: CanaryConfig, comparable: bool) -> Verdict:
    """On a version whose canaries are healthy and were probed; `comparable`: its traffic with the other servers'."""
    assert trial.compared_since is not None, "the canaries' traffic does not count yet"
    steps = sum(group.steps for group in trial.new)
    late = trial.compared_s >= config.wait_s
    if not comparable:
        words = f"{steps} steps of live traffic, which can be compared with no other version's"
        return Verdict("held" if late or steps >= config.steps else "wait", words)
    steps, found = min(steps, sum(group.steps for group in trial.old)), compare_apart(trial.new, trial.old)
    enough = found is not None and steps >= config.steps
    if found is not None and found.is_worse(config.max_loss, LEVEL if enough or late else EARLY_LEVEL):
        return Verdict("back", f"on live traffic its {found.words} of the version before it, {steps} steps")
    words = f"{found.words} on live traffic, {steps} steps" if found else f"hardly any traffic ({steps} steps)"
    return Verdict("held" if enough or late else "wait", words)


def held(state: RolloutState) -> RolloutState:
    """The version under trial goes to all servers."""
    assert state.trial is not None, "nothing is on trial"
    proven = [version for version in state.proven if version != state.trial.version]
    return state.model_copy(update={"trial": None, "proven": (*proven, state.trial.version)[-KEEP_PROVEN:]})


def take_back(state: RolloutState, version: int, reason: str) -> RolloutState:
    """The version leaves the canaries; the registry is to hear of it."""
    proven = tuple(one for one in state.proven if one != version)
    back = {**state.taken_back, version: reason}
    return state.model_copy(update={"trial": None, "target": state.stable, "proven": proven, "taken_back": back})


def reported(state: RolloutState, version: int) -> RolloutState:
    """The registry has heard that the version went back, or does not know it any more."""
    left = {other: reason for other, reason in state.taken_back.items() if other != version}
    return state.model_copy(update={"taken_back": left})


def complete(state: RolloutState) -> RolloutState:
    """All servers run the target: from now on it is what they go back to."""
    proven = state.proven if state.target in (*state.proven, NO_DRAFT) else (*state.proven, state.target)
    return state.model_copy(update={"stable": state.target, "proven": proven[-KEEP_PROVEN:]})
