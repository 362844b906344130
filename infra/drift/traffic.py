"""The record of one draft's traffic: what each server runs, and a series of windows for every version that is served.

Counters are differenced per server and start. A server that was restarted counts from zero, and all that it counts
since belongs to the draft it runs now; what it counted between the last look and its restart is lost, because nobody
saw it. So traffic never counts for a version that did not serve it, in a slow rollout and with canaries alike.

The drift test's state is a function of a series alone, so a restart of the watch changes nothing.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from uuid import NAMESPACE_URL, UUID, uuid5

from infra.drift.scrape import Counters, Reading, Scrape
from infra.drift.sequential import LEARNED_WINDOWS, DriftTest, Statistic
from infra.drift.target import ReportedTarget, with_content
from infra.records.data_path import Record

KEEP_SERIES = 10
"""The versions that served last keep their series."""
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
SILENT_S = DAY_S
"""A server that does not answer for longer runs nothing."""
ADJOINING_S = WEEK_S
"""Windows of two versions adjoin if no more time lies between them: a weekend, or holidays, without requests."""
MOST_S = DAY_S / 4
"""A window counts for no more of a day's service: it may have waited for requests through a night or a weekend."""


class ServedSeries(Record):
    """What must be the same for two windows to be comparable."""

    version: int
    lookahead: int
    traffic: str

    def has_conditions_of(self, other: "ServedSeries") -> bool:
        """Whether only the version differs, if anything."""
        return self.model_copy(update={"version": other.version}) == other


class TrafficWindow(Record):
    """The requests that were finished in a stretch of time."""

    began: float
    ended: float
    """Seconds since 1970, like `began`."""
    tokens: int
    """Emitted by verification steps."""
    steps: int
    requests: int

    @property
    def length(self) -> float:
        """Acceptance length."""
        return self.tokens / self.steps

    @property
    def service_s(self) -> float:
        """How much of a day's service it shows."""
        return min(self.ended - self.began, MOST_S)


def mean_length(windows: Sequence[TrafficWindow]) -> float:
    """Acceptance length over all windows. Raises ZeroDivisionError if there are none."""
    return sum(window.tokens for window in windows) / sum(window.steps for window in windows)


class Series(Record):
    """The traffic of one version under the same conditions, summed over the servers that run it."""

    served: ServedSeries
    opened: float
    """When the open window began."""
    open: Counters = Counters()
    """What the open window holds so far."""
    windows: tuple[TrafficWindow, ...] = ()
    """Oldest first."""
    dropped: int = 0
    """Older windows that are not kept."""
    learned: tuple[TrafficWindow, ...] = ()
    """Windows of another version, from just before this one began to serve: they tell how much the traffic varies."""
    before: Statistic = Statistic()
    """The test before the first window that is kept, where windows were dropped."""
    announced: tuple[float, ...] = ()
    """Ends of the windows whose alarms were made known."""
    fallen_to: float | None = None
    """Acceptance length over the day before the newest of these alarms was made known; None after it recovered."""
    newest_then: int | None = None
    """The newest registered version at that time: whether the alarm led to another one. None: unknown."""

    @property
    def num_windows(self) -> int:
        """All windows so far, dropped ones included."""
        return self.dropped + len(self.windows)

    def counting(self, added: Counters, now: float, least_steps: int) -> "Series":
        """The series with more traffic; the open window is closed once it holds `least_steps` verification steps."""
        counted = self.open.plus(added)
        if counted.steps < least_steps:
            return self.model_copy(update={"open": counted})
        window = TrafficWindow(
            began=self.opened, ended=now, tokens=counted.tokens, steps=counted.steps, requests=counted.requests
        )
        return self.model_copy(update={"windows": (*self.windows, window), "open": Counters(), "opened": now})

    def paused(self, now: float) -> "Series":
        """No server runs the version: its open window is given up, for it must not span the time until one does."""
        return self.model_copy(update={"open": Counters(), "opened": now})

    def trimmed(self, keep: int, test: DriftTest) -> "Series":
        """The newest `keep` windows; what the test made of the dropped ones is kept."""
        surplus = len(self.windows) - keep
        if surplus <= 0:
            return self
        before = judge(self, test).statistics[surplus - 1]
        return self.model_copy(
            update={
                "windows": self.windows[surplus:],
                "dropped": self.dropped + surplus,
                "learned": (),
                "before": before.anew() if test.alarms(before) else before,
            }
        )

    def due(self, verdict: "DriftVerdict", quiet_s: float) -> TrafficWindow | None:
        """The newest window whose alarm has to be announced; None during the quiet time after an announcement."""
        after = max(self.announced) + quiet_s if self.announced else float("-inf")
        alarms = [self.windows[index] for index in verdict.alarms]
        return next((window for window in reversed(alarms) if window.ended > after), None)

    def without_mended_fall(self, test: DriftTest) -> "Series":
        """The series without the fall that was made known last, once a week of service is back at the benchmark.

        A weekend of easier requests mends nothing.
        """
        since = tuple(window for window in self.windows if window.began >= max(self.announced, default=0.0))
        week = newest(since, WEEK_S)
        if self.fallen_to is None or sum(window.service_s for window in week) < WEEK_S:
            return self
        if mean_length(week) < (1 - test.fall / 2) * test.reference.length:
            return self
        return self.model_copy(update={"fallen_to": None})

    def last_day(self) -> tuple[TrafficWindow, ...]:
        """The newest windows that show a day of service, weekends and other breaks left out; all, if they show less."""
        return newest(self.windows, DAY_S)

    def with_announced(self, window: TrafficWindow, newest: int | None = None) -> "Series":
        """The series in which the alarm of this window was made known, when `newest` was the newest version."""
        announced, fallen_to = (*self.announced, window.ended), mean_length(self.last_day())
        return self.model_copy(update={"announced": announced, "fallen_to": fallen_to, "newest_then": newest})


def newest(windows: tuple[TrafficWindow, ...], service_s: float) -> tuple[TrafficWindow, ...]:
    """The newest windows that show as much service; all, if they show less."""
    shown = list(accumulate(window.service_s for window in reversed(windows)))
    return windows[-1 - bisect_left(shown, service_s) :]


@dataclass(frozen=True)
class DriftVerdict:
    """The test's result on a series of windows."""

    statistics: Sequence[Statistic]
    """The statistic after each window; it restarts after an alarm."""
    alarms: Sequence[int]
    """Indices of the windows that raised one."""


def judge(series: Series, test: DriftTest) -> DriftVerdict:
    """Run the test over a series."""
    statistic = series.before
    for window in series.learned:
        statistic = test.after(statistic, window.tokens, window.steps)
    if series.learned:
        statistic = statistic.of_next_version()
    statistics: list[Statistic] = []
    alarms: list[int] = []
    for index, window in enumerate(series.windows):
        statistic = test.after(statistic, window.tokens, window.steps)
        statistics.append(statistic)
        if test.alarms(statistic):
            alarms.append(index)
            statistic = statistic.anew()
    return DriftVerdict(statistics, alarms)


class ServerState(Record):
    """One server at the last look."""

    start: str
    swapped: str | None = None
    """As `ServedDraft.swapped`."""
    version: int | None
    """None if its draft is unknown."""
    lookahead: int | None
    counters: Counters
    reported: bool = False
    """Whether this start was reported to run an unknown draft."""
    target: ReportedTarget | None = None
    """As it was at this start."""
    silent_since: float | None = None
    """Time of the first of the last looks at which it did not answer; None: it answered."""
    unsure: bool = False
    """Whether its traffic since the look before is left out, because too many requests may have generated nothing."""

    def served(self, traffic: str) -> ServedSeries | None:
        """The series that its requests of this kind belong to; None: they are not counted."""
        if self.version is None or self.lookahead is None:
            return None
        return ServedSeries(version=self.version, lookahead=self.lookahead, traffic=traffic)


class Leading(Record):
    """The version that more than half of the servers run."""

    version: int
    since: float


class TrafficRecord(Record):
    """All that is known of one draft's traffic."""

    draft: str
    servers: Mapping[str, ServerState] = {}
    """Servers by address."""
    series: tuple[Series, ...] = ()
    """Ordered by when they last had traffic, newest last."""
    leading: Leading | None = None
    targets: Mapping[int, ReportedTarget] = {}
    """The target under each version when most of its servers were seen first, or since the last change."""
    change_announced: float = 0.0
    """When a change of the target was made known last."""
    changed_version: int | None = None
    """Under which version."""

    def version_of(self, server: str, reading: Reading) -> int | None:
        """The version that this start of a server was found to run earlier.

        It is found once per start and swap: a folder whose content is replaced later does not change what was loaded.
        """
        state, draft = self.servers.get(server), reading.draft
        return state.version if state and (state.start, state.swapped) == (draft.start, draft.swapped) else None

    def observe(
        self, scrape: Scrape, versions: Mapping[str, int | None], traffic: str, now: float, least_steps: int
    ) -> "TrafficRecord":
        """The record after a look.

        Args:
            scrape: what the servers reported. A silent one is waited for, a day at most; one that is in neither list
                is forgotten.
            versions: by server, the version that it runs; None: unknown.
            traffic: kind of the requests.
            now: seconds since 1970.
            least_steps: verification steps that close a window.
        """
        servers = {
            url: state.model_copy(update={"unsure": False, "silent_since": since})
            for url, state in self.servers.items()
            if url in scrape.silent
            and now - (since := now if state.silent_since is None else state.silent_since) <= SILENT_S
        }
        added: dict[ServedSeries, Counters] = {}
        for url, reading in scrape.readings.items():
            state = self._state(url, reading, versions[url], now)
            served, counted = state.served(traffic), self._counted(url, reading, state)
            if served is not None and not counted.is_sure:
                state, counted = state.model_copy(update={"unsure": True}), Counters()
            servers[url] = state
            if served is not None:
                added[served] = added.get(served, Counters()).plus(counted)
        run = [state.served(traffic) for state in servers.values()]
        series = {one.served: one if one.served in run else one.paused(now) for one in self.series}
        for served, counters in added.items():
            one = series.pop(served, None) or Series(served=served, opened=now, learned=self._learned(served))
            series[served] = one.counting(counters, now, least_steps)
        kept = tuple(series.values())[-KEEP_SERIES:]
        record = self.model_copy(update={"servers": servers, "series": kept, "leading": self._leading(servers, now)})
        first = {version: target for version, target in record.targets_now().items() if version not in self.targets}
        return record.model_copy(update={"targets": dict([*self.targets.items(), *first.items()][-KEEP_SERIES:])})

    def _state(self, url: str, reading: Reading, version: int | None, now: float) -> ServerState:
        before = self.servers.get(url)
        if before and before.start != reading.draft.start:
            before = None
        lookahead = reading.lookahead or (before.lookahead if before else None)
        return ServerState(
            target=(before and before.target) or (reading.target and with_content(reading.target)),
            start=reading.draft.start,
            swapped=reading.draft.swapped,
            version=version,
            lookahead=None if reading.uncounted else lookahead,
            counters=reading.counters,
            reported=before is not None and before.reported and before.swapped == reading.draft.swapped,
        )

    def _counted(self, url: str, reading: Reading, state: ServerState) -> Counters:
        """Counts of a server since the previous scrape; zero at the first one."""
        before = self.servers.get(url)
        if before is None:
            return Counters()
        if before.start != state.start:
            return reading.counters
        if before.lookahead not in (None, state.lookahead) or before.swapped != state.swapped:
            return Counters()  # some of it at one lookahead or with one draft, some with another
        return reading.counters.since(before.counters)

    def _learned(self, served: ServedSeries) -> tuple[TrafficWindow, ...]:
        """Windows of the version that served last under the same conditions."""
        others = [one for one in self.series if one.windows and one.served.has_conditions_of(served)]
        return others[-1].windows[-LEARNED_WINDOWS:] if others else ()

    @property
    def silent(self) -> list[str]:
        """Servers that did not answer at the last look, and are waited for."""
        return sorted(url for url, state in self.servers.items() if state.silent_since is not None)

    def _leading(self, servers: Mapping[str, ServerState], now: float) -> Leading | None:
        run = [state.version for state in servers.values()]
        version = next((one for one in run if one is not None and 2 * run.count(one) > len(run)), None)
        if version is None:
            return None
        return self.leading if self.leading and self.leading.version == version else Leading(version=version, since=now)

    def targets_now(self) -> dict[int, ReportedTarget]:
        """The target under each version, where more than half of its servers agree."""
        found: dict[int, list[ReportedTarget]] = {}
        for state in self.servers.values():
            if state.version is not None and state.target is not None:
                found.setdefault(state.version, []).append(state.target)
        most = {version: max(targets, key=targets.count) for version, targets in found.items()}
        return {version: one for version, one in most.items() if 2 * found[version].count(one) > len(found[version])}

    def change_under(self, version: int) -> tuple[ReportedTarget, ReportedTarget] | None:
        """The target that a version had and the one that it has now; None where nothing has changed."""
        before, now = self.targets.get(version), self.targets_now().get(version)
        return None if before is None or now is None or not before.changes_to(now) else (before, now)

    def with_change_announced(self, version: int, now: ReportedTarget, when: float) -> "TrafficRecord":
        """The record in which a change of the target was made known."""
        targets = {**self.targets, version: now}
        return self.model_copy(update={"targets": targets, "change_announced": when, "changed_version": version})

    def announced(self, version: int) -> float:
        """The end of the newest window whose alarm was made known, at whatever lookahead, or the time when a change of
        the version's target was, if that is later; minus infinity: never."""
        ends = [end for one in self.series if one.served.version == version for end in one.announced]
        changed = [self.change_announced] if version == self.changed_version else []
        return max([*ends, *changed], default=float("-inf"))

    def num_windows(self, version: int) -> int:
        """All windows of a version so far, under whatever conditions."""
        return sum(one.num_windows for one in self.series if one.served.version == version)

    def live(self, traffic: str) -> tuple[Series, ...]:
        """The series of this kind of traffic, of the versions that a server runs now."""
        run = [state.served(traffic) for state in self.servers.values()]
        return tuple(one for one in self.series if one.served in run)

    def with_series(self, series: Series) -> "TrafficRecord":
        """The record with one series in place of that of the same version and conditions."""
        replaced = tuple(series if one.served == series.served else one for one in self.series)
        return self.model_copy(update={"series": replaced})

    def with_reported(self, servers: set[str]) -> "TrafficRecord":
        """The record in which these servers were reported to run an unknown draft."""
        reported = {url: self.servers[url].model_copy(update={"reported": True}) for url in servers}
        return self.model_copy(update={"servers": {**self.servers, **reported}})

    def before_version(self, version: int, after: Series) -> tuple[TrafficWindow, ...]:
        """What a version's series is compared with: windows of the version that it replaced, under the same conditions.

        Older ones than adjoin the series are of other traffic. After an alarm of the replaced version only the windows
        since: they show what the fallen traffic allows.
        """
        of_version = after.served.model_copy(update={"version": version})
        series = next((one for one in self.series if one.served == of_version), None)
        if series is None or not after.windows:
            return ()
        since = max([*series.announced, after.windows[0].began - ADJOINING_S])
        return tuple(window for window in series.windows if window.ended >= since)

    def event_id(self, *about: object) -> UUID:
        """Id of an event: sent twice, it is one event."""
        return uuid5(NAMESPACE_URL, "/".join(["draftsmith", self.draft, *map(str, about)]))
