"""The servers of a follower as they are: looked at all at once, started, stopped."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError, TimeoutExpired

import httpx

from infra.drift.scrape import Counters
from infra.refusal import Refusal
from infra.serving.comparison import StepGroup
from infra.serving.config import FollowConfig
from infra.serving.control import OwnServer, RestartedServer, ServerControl, control_of
from infra.serving.failures import ReportFailure, read_failure
from infra.serving.gpu_locks import ServerGpus
from infra.serving.rollout import Condition, RolloutState, SeenServer, ServerStep, StartOutcome, in_words
from infra.serving.servers import ServerClient, ServerReport, version_of
from infra.serving.versions import VersionFolder

BACKOFF_S, MOST_BACKOFF_S = 5.0, 300.0
"""Before a server is started again that failed to start: doubled each time."""
MOST_POLLS = 5
"""Counted between two looks at most: a clock may jump, and a machine may sleep."""
FOREIGN_SERVER = "a server that serve-follow did not start answers there"


@dataclass(frozen=True)
class LookedAt:
    """A server as it was seen."""

    seen: SeenServer
    report: ServerReport | None
    """Of a healthy server."""


class Fleet:
    """The servers, in the order of the settings."""

    def __init__(self, config: FollowConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self.urls = [server.url for server in config.servers]
        self.controls: dict[str, ServerControl] = {server.url: control_of(server, config) for server in config.servers}
        self.clients = {url: ServerClient(url) for url in self.urls}
        self.gpus = ServerGpus(config.servers, say)
        self.gpus.take()  # the first look comes after a download, which may take minutes
        self._failures = dict.fromkeys(self.urls, 0)
        self._due = dict.fromkeys(self.urls, 0.0)
        self._unhealthy: dict[str, float] = {}
        """Since when a server that was healthy is not."""
        self._foreign: frozenset[str] = frozenset()
        """Addresses where servers answer that are not ours; said once."""
        self._unusable: dict[str, str] = {}
        """Why a server that answers cannot be followed, by address; said once."""
        self._starts: dict[str, str] = {}
        """Which start of a server answered last, by address."""
        self._asked: dict[str, str] = {}
        """The same when this process had the server started."""
        self._held: set[str] = set()
        """Servers whose replacement waits for others; said once."""
        self._programless: set[str] = set()
        """Servers that are not replaced while their program is missing; said once."""
        self._counters: dict[str, tuple[str, Counters]] = {}
        """Start and counters of each server when its traffic was asked for last."""
        self._told: dict[str, float] = {}
        """When this process told a server to stop, by address."""
        self._looked = time.monotonic()
        self.watched_s = 0.0
        """Seconds between the last two looks."""

    def check_free(self) -> None:
        """Raise Refusal where a server answers that we would have to start, and did not."""
        for url, control in self.controls.items():
            if isinstance(control, OwnServer) and control.age() is None and self.clients[url].answers():
                raise Refusal(
                    f"{url}: {FOREIGN_SERVER}: stop it, or give `restart` (a command that restarts it) in place of "
                    "`command`"
                )

    def look(self, state: RolloutState) -> list[LookedAt]:
        """All servers, asked at the same time, after their GPUs were locked."""
        self.gpus.take()
        before, self._looked = self._looked, time.monotonic()
        self.watched_s = min(self._looked - before, MOST_POLLS * self._config.poll_s)
        with ThreadPoolExecutor(len(self.urls)) as threads:
            reports = list(threads.map(self._report, self.urls))
        healthy = sum(isinstance(report, ServerReport) for report in reports)
        return [self._seen(url, report, state, healthy) for url, report in zip(self.urls, reports, strict=True)]

    def traffic_since(self, looks: Sequence[LookedAt]) -> dict[str, StepGroup]:
        """What healthy servers have counted since this was asked last, by address."""
        found: dict[str, StepGroup] = {}
        for url, report in reports_of(looks).items():
            start, before = self._counters.get(url, ("", Counters()))
            self._counters[url] = (report.draft.start, report.counters)
            if start == report.draft.start:
                increase = report.counters.since(before)
                if increase.steps:
                    found[url] = StepGroup(tokens=max(0, increase.tokens), steps=increase.steps)
        return found

    def _report(self, url: str) -> ServerReport | Refusal | ReportFailure:
        try:
            return self.clients[url].report()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            return read_failure(error, url, has_restart=isinstance(self.controls[url], RestartedServer))
        except Refusal as refusal:
            return refusal

    def _seen(
        self, url: str, report: ServerReport | Refusal | ReportFailure, state: RolloutState, healthy: int
    ) -> LookedAt:
        """`healthy`: how many servers gave a report."""
        age = self.controls[url].age()
        if url in state.stopped and age is not None and isinstance(self.controls[url], OwnServer):
            self._drain(url)
            return LookedAt(SeenServer(url, "draining"), None)
        gone = age is None and isinstance(self.controls[url], OwnServer)
        foreign = gone and not isinstance(report, ReportFailure)
        if foreign and url not in self._foreign:
            self._say(f"{url}: {FOREIGN_SERVER}: stop it, and the follower starts its own")
        self._foreign = self._foreign | {url} if foreign else self._foreign - {url}
        if foreign:
            return LookedAt(SeenServer(url, "waiting"), None)
        unreachable = isinstance(report, ReportFailure) and report.kind == "unreachable" and not gone
        if isinstance(report, Refusal) or unreachable:  # it may well serve its users, so it is left alone
            self._complain(url, report.words if isinstance(report, ReportFailure) else str(report))
            self._unhealthy.pop(url, None)
            return LookedAt(SeenServer(url, "waiting"), None)
        if isinstance(report, ServerReport):
            self._unhealthy.pop(url, None)
            self._told.pop(url, None)
            version = version_of(report.draft, Path(self._config.folder), self._config.draft)
            started = None if url in state.not_restarted else state.started.get(url)
            condition = self._answering(url, report.draft.start, version, started)
            return LookedAt(SeenServer(url, condition, version), report if condition == "healthy" else None)
        self._unusable.pop(url, None)
        return LookedAt(SeenServer(url, self._condition(url, age, report, state, healthy)), None)

    def _complain(self, url: str, trouble: str) -> None:
        if self._unusable.get(url) != trouble:
            self._unusable[url] = trouble
            self._say(trouble)

    def _answering(self, url: str, start: str, version: int, started: int | None) -> Condition:
        """Of a server that answers: whether it is as it was `started` last, which another supervisor may still do."""
        self._starts[url] = start
        if started in (None, version):
            self._unusable.pop(url, None)
            if started is not None:
                self._failures[url], self._due[url] = 0, 0.0
            return "healthy" if self._is_due(url) else "waiting"
        own, age = isinstance(self.controls[url], OwnServer), self.controls[url].age()
        is_new = own or self._asked.get(url, start) != start
        if not is_new and age is not None and age <= self._config.start_timeout_s:
            return "starting"
        if url not in self._asked:  # by a follower that has ended: this one tries once more
            return "healthy"
        self._complain(
            url,
            f"{url} runs {in_words(version)}, although it was started with {in_words(started)}: have its command pass "
            "the draft's arguments on, and start it and serve-follow again",
        )
        return "waiting"

    def _drain(self, url: str) -> None:
        if url not in self._told:  # a follower that was killed may have written it down and no more
            self.stop(url)
        elif time.monotonic() - self._told[url] > self._config.drain_s:
            self.controls[url].kill()

    def _condition(
        self, url: str, age: float | None, failure: ReportFailure, state: RolloutState, healthy: int
    ) -> Condition:
        """Of a server that is not healthy and that no rollout has told to stop."""
        config, own, now = self._config, isinstance(self.controls[url], OwnServer), time.monotonic()
        if (age is None and own) or url in state.not_restarted:
            self._unhealthy.pop(url, None)
            return self._down(url)
        is_new = url in state.started and age is not None
        limit = config.start_timeout_s if is_new else config.unhealthy_s
        since = age if is_new and age is not None else now - self._unhealthy.setdefault(url, now)
        if since <= limit:
            self._held.discard(url)
            return "starting"
        # One that hangs may still answer its users, and where all seem to hang the fault may be elsewhere.
        alive = not is_new and (failure.kind == "failing" or url in self._told)
        if url not in self._told:
            if alive and healthy < config.healthy_others and self._others_change(url, state):
                if url not in self._held:
                    self._held.add(url)
                    self._say(
                        f"{url} is not healthy ({failure.words}); its replacement waits until {config.healthy_others} "
                        "others are healthy, or no other is being replaced"
                    )
                return "starting"
            self._say(f"{url} has not been healthy for {since:.0f} s ({failure.words}): it is started again")
        if alive and own:
            self._drain(url)
            return "draining"
        self._unhealthy.pop(url, None)
        self.controls[url].kill()
        if own:
            return "starting"
        self._told[url] = now
        return self._down(url)

    def _others_change(self, url: str, state: RolloutState) -> bool:
        """Whether another server is being stopped or started. One that cannot be followed, does not start, or waits for
        its GPU may stay so for ever."""
        waits = (other for other in self.urls if self._failures[other] or not self.gpus.can_start(other))
        stuck = {url, *self._unusable, *waits}
        return bool({*self._told, *state.started, *state.stopped} - stuck)

    def _down(self, url: str) -> Condition:
        return "down" if self._is_due(url) and self.gpus.can_start(url) else "waiting"

    def wanted_now(self, seen: Sequence[SeenServer], wanted: Sequence[int]) -> list[int]:
        """What each server is to run for now: a healthy one that could not be started again serves on as it is.

        So it is not stopped, is sent no weights, after which it may have to be restarted, and no other waits for it.
        """
        return [
            one.version if one.condition == "healthy" and one.version != version and self._stays(one.url) else version
            for one, version in zip(seen, wanted, strict=True)
        ]

    def _stays(self, url: str) -> bool:
        control = self.controls[url]
        program = control.missing_program() if isinstance(control, OwnServer) else None
        if program is None:
            self._programless.discard(url)
        elif url not in self._programless:
            self._programless.add(url)
            self._say(f"{url} is not replaced, because {program} is not found: install it, or correct `command`")
        return program is not None or not self.gpus.can_start(url)

    def _is_due(self, url: str) -> bool:
        return time.monotonic() >= self._due[url]

    def failed(self, url: str) -> None:
        """A start has failed: the next one waits longer."""
        self._due[url] = time.monotonic() + min(BACKOFF_S * 2 ** self._failures[url], MOST_BACKOFF_S)
        self._failures[url] += 1

    def with_restarted(self, state: RolloutState) -> RolloutState:
        """The state without `not_restarted` servers that have answered as new ones although their command failed."""
        left = (url for url in state.not_restarted if self._asked.get(url) in (None, self._starts.get(url, "")))
        return state.model_copy(update={"not_restarted": tuple(left)})

    def start(self, step: ServerStep, arguments: Sequence[str]) -> StartOutcome:
        """Start a server, or have it restarted."""
        url = step.url
        self._say(f"{url} starts with {in_words(step.version)}")
        self._told.pop(url, None)
        self._asked[url] = self._starts.get(url, "")
        try:
            self.controls[url].start(arguments)
        except (CalledProcessError, TimeoutExpired) as error:
            self._say(f"{url}: {error}; see {self._config.folder}/logs")
            if isinstance(error, TimeoutExpired):
                return "started"  # it may be on its way although its command hangs
            if step.kind == "stop":  # another one has failed when it is seen down
                self.failed(url)
            return "failed"
        except Refusal as refusal:  # the others are followed all the same
            self._say(f"{url}: {refusal}")
            self.failed(url)
            return "impossible"
        return "started"

    def swap(self, url: str, ranks: int, version: VersionFolder, weights: str) -> None:
        """Load a version's weights into a running server. Raises httpx.HTTPError where it does not take them."""
        began = time.monotonic()
        self.clients[url].swap(weights, ranks, f"{self._config.draft}@{version.version}")
        self.controls[url].swapped(version.arguments)
        self._say(f"{url} took the weights of version {version.version} in {time.monotonic() - began:.1f} s as it ran")

    def stop(self, url: str) -> bool:
        """Let a server finish its requests and end; False where its start replaces it."""
        self._told[url] = time.monotonic()
        return self.controls[url].stop()

    def stop_all(self, state: RolloutState) -> RolloutState:
        """Tell every server of ours that runs to stop, once."""
        own = [url for url, control in self.controls.items() if isinstance(control, OwnServer)]
        running = [url for url in own if self.controls[url].age() is not None]
        stopped = {url: state.stopped.get(url, time.time()) for url in running}
        for url in running:
            self._drain(url)
        return state.model_copy(update={"stopped": stopped})


def reports_of(looks: Sequence[LookedAt]) -> Mapping[str, ServerReport]:
    """The reports of healthy servers, by address."""
    return {look.seen.url: look.report for look in looks if look.report is not None}
