"""Follows the registry: brings servers to its champion, and takes back there what does not hold here.

Every round looks at the registry and at all servers, decides (`infra.serving.rollout`), writes the decision down, and
does one thing. It keeps nothing in memory that it could not do without, so it may be killed at any point.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from infra.files.atomic import write_atomically
from infra.records.acceptance import RequestCounts
from infra.refusal import Refusal, first_line
from infra.serving.config import FollowConfig
from infra.serving.fleet import Fleet, LookedAt, reports_of
from infra.serving.rollout import (
    FOREIGN,
    MAX_FAILURES,
    NO_DRAFT,
    RolloutState,
    SeenServer,
    ServerStep,
    Trial,
    after_start,
    canaries,
    complete,
    heed,
    held,
    in_words,
    judge,
    next_steps,
    reported,
    starting,
    take_back,
    wanted_versions,
    with_control,
    without,
)
from infra.serving.servers import BusyError, ServerReport, expected, trouble_with
from infra.serving.swap import CannotSwapError, changed_weights
from infra.serving.versions import BrokenVersionError, VersionFolder, fetch, open_version, remove_others
from infra.tracking import registry
from infra.tracking.client import REGISTRY_ERRORS, check_answers, connect, find_model

BY = "serving follower"

Withdraw = Callable[[int, str], None]
"""Takes a version out of service in the registry, with the reason."""


class Follower:
    """One draft's servers.

    Args:
        withdraw: called for a version that did not hold; called again after an interruption.
        say: one line for people.
    """

    def __init__(self, config: FollowConfig, uri: str, withdraw: Withdraw, say: Callable[[str], None]) -> None:
        self._config, self._uri, self._withdraw = config, uri, withdraw
        self._folder = Path(config.folder)
        self._said: dict[str, str] = {}
        self._print = say
        self._fleet = Fleet(config, say)
        self._opened: dict[int, VersionFolder] = {}
        self._away = False
        """Whether the registry did not answer in this round: then it is not asked again, which may take minutes."""
        self._file = self._folder / config.draft / "state.json"
        self.state = RolloutState.read(self._file) if self._file.is_file() else self._first_state()

    def _first_state(self) -> RolloutState:
        """What most servers run is what they go back to. Raises Refusal where other servers have the addresses."""
        self._fleet.check_free()
        looks = self._fleet.look(RolloutState(target=NO_DRAFT, stable=NO_DRAFT))
        run = [look.seen.version for look in looks if look.seen.condition == "healthy"]
        stable = max(run, key=run.count, default=NO_DRAFT)
        return RolloutState(target=stable, stable=stable)

    def _keep(self, state: RolloutState) -> None:
        if state != self.state:
            self.state = state
            write_atomically(self._file, state)

    def _say(self, about: str, line: str) -> None:
        """Say it unless it was the last thing said about this."""
        if self._said.get(about) != line:
            self._said[about] = line
            self._print(line)

    def round(self) -> bool:
        """One look and what follows from it; returns whether every server runs what the registry wants."""
        heard = self._hear()
        looks, target = self._fleet.look(self.state), self.state.target
        self._note(looks)
        self._try(looks)
        return self._act(looks) and heard and self.state.target == target

    def _hear(self) -> bool:
        """What the registry says, after it was told what was taken back; False where nothing can be done about it."""
        self._away = True
        try:
            check_answers(self._uri)
            self._away = False
            find_model(connect(self._uri), self._config.draft)  # a wrong name is no withdrawal
            self._report_taken_back()
            champion = registry.champion(self._uri, self._config.draft)
            told = NO_DRAFT if champion is None else champion.version
            if told != NO_DRAFT:
                self._opened[told] = self._open(told)
            self._say("registry", f"the registry's champion: {in_words(told)}")
        except BrokenVersionError as error:
            assert champion is not None, "only a version can be broken"
            self._take_back(champion.version, str(error))
            return False
        except REGISTRY_ERRORS as error:
            self._say("registry", f"servers stay as they are: {first_line(error)}")
            return False
        if told != NO_DRAFT and not self._opened[told].arguments:
            self._say("alone", f"version {told}: the target alone is faster, says its benchmark: no draft is served")
        self._keep(heed(self.state, told))
        return told not in self.state.taken_back

    def _report_taken_back(self) -> None:
        """Withdraw in the registry what was taken back here. Where that fails, what is promoted next is heard of."""
        if not self.state.taken_back:
            return
        known = {draft.version for draft in registry.list_drafts(self._uri, self._config.draft)}
        for version, reason in self.state.taken_back.items():
            try:
                if version in known:
                    self._withdraw(version, reason)
            except REGISTRY_ERRORS as error:
                self._say(f"back {version}", f"the registry does not withdraw version {version}: {first_line(error)}")
                continue
            self._keep(reported(self.state, version))

    def _open(self, version: int) -> VersionFolder:
        """A version's folder, checked once. Raises BrokenVersionError and the registry's errors."""
        if version not in self._opened:
            config = self._config
            place = fetch(self._uri, config.draft, version, self._folder)
            self._opened[version] = open_version(place, config.arguments, config.adaptive)
        return self._opened[version]

    def _served(self, version: int) -> VersionFolder | None:
        """A version's folder, unchecked where the registry is away; None for one that is gone from both."""
        config = self._config
        try:
            if self._away and version not in self._opened:
                raise ConnectionError("the registry does not answer")
            return self._open(version)
        except BrokenVersionError as error:
            self._say("broken", f"version {version} cannot be served any more: {error}")
            return None
        except REGISTRY_ERRORS as error:
            self._say("unchecked", f"version {version} is served unchecked: {first_line(error)}")
        place = self._folder / config.draft / str(version)
        try:
            return open_version(place, config.arguments, config.adaptive) if place.is_dir() else None
        except Refusal:  # the message that was just shown
            return None

    def _arguments(self, version: int) -> tuple[str, ...]:
        """SGLang's for a version; none where no draft is to be served."""
        folder = None if version in (NO_DRAFT, FOREIGN) else self._served(version)
        return folder.arguments if folder else ()

    def _reported(self, version: int) -> int:
        """What a server reports that is to run a version: NO_DRAFT for one that is better served without."""
        return version if self._arguments(version) else NO_DRAFT

    def _wanted(self, looks: Sequence[LookedAt]) -> list[int]:
        """What each server is to run."""
        wanted = wanted_versions(self.state, len(looks), self._config.canary.share)
        served = {version: self._reported(version) for version in set(wanted)}
        # What a server ran that was not ours is left alone, and gone once it has been replaced.
        return [
            look.seen.version if version == FOREIGN and look.seen.version == FOREIGN else served[version]
            for look, version in zip(looks, wanted, strict=True)
        ]

    def _note(self, looks: Sequence[LookedAt]) -> None:
        """What has become of starts and stops since the last round."""
        blamed: str | None = None
        self._keep(self._fleet.with_restarted(with_control(self.state, [look.seen for look in looks])))
        for look in looks:
            url, condition = look.seen.url, look.seen.condition
            started, stopped = dict(self.state.started), dict(self.state.stopped)
            if condition == "healthy" and started.pop(url, None) is not None:
                self._print(f"{url} is healthy with {in_words(look.seen.version)}")
            if condition in ("down", "waiting"):
                stopped.pop(url, None)
            version = started.pop(url, None) if condition == "down" else None
            died = condition == "down" and version is None and url not in self.state.stopped
            self._keep(self.state.model_copy(update={"started": started, "stopped": stopped}))
            if version is not None:
                self._fleet.failed(url)
                self._print(f"{url} did not become healthy with {in_words(version)}")
            trial = self.state.trial
            if trial and (version == trial.version or (died and url in trial.probed)):
                blamed = f"{url} died with it, or did not start, {MAX_FAILURES} times"
        if blamed and self.state.trial:  # once, however many died: all do when their machine is restarted
            self._failure(self.state.trial.version, blamed, bool(self.state.trial.probed))

    def _failure(self, version: int, reason: str, started: bool = False) -> None:
        """One more that may be the fault of the version under trial; `started`: a server was healthy with it."""
        trial = self.state.trial
        if trial is None or trial.version != version:
            return
        trial = trial.model_copy(update={"failures": trial.failures + 1})
        self._keep(self.state.model_copy(update={"trial": trial}))
        if trial.failures < MAX_FAILURES:
            return
        if trial.control or started:
            self._take_back(version, reason)
            return
        self._print(
            f"no server has started so far, with or without version {version}: they are started without it first; see "
            f"{self._config.folder}/logs"
        )
        suspended = trial.model_copy(update={"failures": 0, "suspended": True})
        self._keep(self.state.model_copy(update={"trial": suspended}))

    def _take_back(self, version: int, reason: str) -> None:
        self._print(f"version {version} goes back: {reason}")
        self._keep(take_back(self.state, version, reason))

    def _try(self, looks: Sequence[LookedAt]) -> None:
        """Try the version under trial: prompts before and after, live traffic, verdict."""
        traffic = self._fleet.traffic_since(looks)
        trial = self.state.trial
        folder = self._served(trial.version) if trial else None
        if trial is None or folder is None:
            return
        if not folder.arguments:
            self._keep(held(self.state))
            return
        if trial.before is None:
            self._probe_before(trial, folder.counts, looks)
        first = canaries(len(looks), self._config.canary.share)
        reports = reports_of(looks)
        tried = [look.seen for look in looks[:first]]
        if any(one.condition != "healthy" or one.version != trial.version for one in tried):
            return
        unprobed = [one.url for one in tried if one.url not in trial.probed]
        for url in unprobed:
            if not self._probe(url, folder.counts, reports[url]):
                return
        trial = self.state.trial
        if trial is None or unprobed:  # the next round's counts still hold the prompts
            return
        if trial.compared_since is None:
            trial = trial.model_copy(update={"compared_since": time.time()})
            self._keep(self.state.model_copy(update={"trial": trial}))
            return
        new = {one.url for one in tried}
        stable = self._reported(self.state.stable)
        old = {look.seen.url for look in looks[first:] if look.report and look.seen.version == stable}
        ours, theirs = ([traffic[url] for url in urls if url in traffic] for urls in (new, old))
        trial = trial.with_traffic(ours, theirs, self._fleet.watched_s)
        self._keep(self.state.model_copy(update={"trial": trial}))
        self._decide(trial, looks, first)

    def _decide(self, trial: Trial, looks: Sequence[LookedAt], first: int) -> None:
        stable = self._reported(self.state.stable)
        lookaheads = {look.report.lookahead for look in looks[:first] if look.report}
        others = {look.report.lookahead for look in looks[first:] if look.report and look.seen.version == stable}
        drafted = stable != NO_DRAFT
        if looks[first:] and drafted and not others:
            return  # a server with the version before is to come back first
        comparable = drafted and lookaheads == others != {None} and len(others) == 1
        verdict = judge(trial, self._config.canary, comparable)
        if verdict.outcome == "back":
            self._take_back(trial.version, verdict.reason)
        elif verdict.outcome == "held":
            self._print(f"version {trial.version} holds: {verdict.reason}")
            self._keep(held(self.state))

    def _probe_before(self, trial: Trial, counts: RequestCounts | None, looks: Sequence[LookedAt]) -> None:
        """Answers of a server without the version, while there is one."""
        for look in reversed(looks):
            if counts is None or not counts.prompts or look.report is None or look.seen.version == trial.version:
                continue
            try:
                client = self._fleet.clients[look.seen.url]
                before = client.probe(look.report, counts.prompts, counts.conditions.max_new_tokens)
            except httpx.HTTPError:
                continue
            self._keep(self.state.model_copy(update={"trial": trial.model_copy(update={"before": before})}))
            return

    def _probe(self, url: str, counts: RequestCounts | None, report: ServerReport) -> bool:
        """Whether a canary answers the version's prompts as it should."""
        trial = self.state.trial
        assert trial is not None, "a version is on trial"
        if counts is not None and counts.prompts:
            try:
                probe = self._fleet.clients[url].probe(report, counts.prompts, counts.conditions.max_new_tokens)
            except httpx.HTTPError as error:
                if isinstance(error, BusyError):  # by its users, whatever it runs
                    self._say("busy", first_line(error))
                else:
                    self._failure(trial.version, f"{url} does not answer prompts with it ({first_line(error)})", True)
                return False
            benchmarked = expected(counts, report.lookahead)
            trouble = trouble_with(probe, benchmarked, trial.before, self._config.canary.max_loss)
            if trouble is not None:
                self._take_back(trial.version, trouble)
                return False
        self._print(f"{url} answers as expected with version {trial.version}")
        trial = trial.model_copy(update={"probed": (*trial.probed, url)})
        self._keep(self.state.model_copy(update={"trial": trial}))
        return True

    def _act(self, looks: Sequence[LookedAt]) -> bool:
        """Start and stop what is next; returns whether all is as the registry wants it."""
        wanted = self._wanted(looks)
        seen = [self._as_started(look.seen, version, look.report) for look, version in zip(looks, wanted, strict=True)]
        for step in next_steps(seen, self._fleet.wanted_now(seen, wanted), self._config.healthy_others):
            if step.kind == "stop":
                if self._swap(step, looks):
                    continue
                self._print(f"{step.url} is replaced, to run {in_words(step.version)}")
                self._keep(self.state.model_copy(update={"stopped": {**self.state.stopped, step.url: time.time()}}))
                if self._fleet.stop(step.url):
                    continue
                self._keep(self.state.model_copy(update={"stopped": without(self.state.stopped, step.url)}))
            self._keep(starting(self.state, step))
            outcome = self._fleet.start(step, self._arguments(step.version))
            self._keep(after_start(self.state, step, outcome))
        pairs = zip(seen, wanted, strict=True)
        done = all(one.condition == "healthy" and one.version == version for one, version in pairs)
        if not done or self.state.trial is not None:
            return False
        if self.state.stable != self.state.target or self._said.get("done") != str(self.state.target):
            self._said["done"] = str(self.state.target)
            self._print(f"all servers run {in_words(self.state.target)}")
        self._keep(complete(self.state))
        remove_others(self._folder, self._config.draft, {self.state.target, *self.state.proven[-2:]})
        return True

    def _as_started(self, seen: SeenServer, wanted: int, report: ServerReport | None) -> SeenServer:
        """A server whose command or arguments are not those of the settings any more is replaced like a foreign one.

        So is one whose swap was interrupted, or whose restart failed.
        """
        if seen.condition != "healthy":
            return seen
        if seen.url in self.state.swapping:
            with suppress(httpx.HTTPError):  # its requests may wait for this, before it can stop
                self._fleet.clients[seen.url].resume()
            return replace(seen, version=FOREIGN)
        if seen.version != wanted or wanted == FOREIGN:
            return seen
        is_as_set = seen.url not in self.state.not_restarted and self._is_as_set(seen.url, wanted, report)
        return seen if is_as_set else replace(seen, version=FOREIGN)

    def _is_as_set(self, url: str, version: int, report: ServerReport | None) -> bool:
        """Whether a server runs as the settings say. After a swap, its command line names the folder that it loaded."""
        now, control = self._arguments(version), self._fleet.controls[url]
        if control.was_started_with(now):
            return True
        loaded = report.draft.path if report and report.draft.swapped else None
        return loaded is not None and control.was_started_with((*now[:1], loaded, *now[2:]))

    def _swap(self, step: ServerStep, looks: Sequence[LookedAt]) -> bool:
        """Load a version's weights into a running server; False where it is to be restarted."""
        look = next(look for look in looks if look.seen.url == step.url)
        url, before, report = step.url, look.seen.version, look.report
        if report is None or report.workers > 1 or not self._config.swap or url in self.state.swapping:
            return False
        versions = {before, step.version}
        if len(versions) < 2 or versions & {NO_DRAFT, FOREIGN} or not self._is_as_set(url, before, report):
            return False
        old, new = self._served(before), self._served(step.version)
        if old is None or new is None or old.arguments[2:] != new.arguments[2:]:
            return False
        try:
            weights = changed_weights(old.path, new.path, report.ranks)
            self._keep(self.state.model_copy(update={"swapping": (*self.state.swapping, url)}))
            self._fleet.swap(url, report.ranks, new, weights)
        except (CannotSwapError, httpx.HTTPError) as error:
            self._say("swap", f"{url} is restarted for version {step.version}: {first_line(error)}")
            return False
        swapping = tuple(other for other in self.state.swapping if other != url)
        self._keep(self.state.model_copy(update={"swapping": swapping}))
        return True

    def stop_servers(self) -> None:
        """Let all servers that were started from their command line finish their requests and end."""
        while True:
            self._keep(self._fleet.stop_all(self.state))
            if not self.state.stopped:
                return
            time.sleep(min(1.0, self._config.poll_s))
