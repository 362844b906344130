"""The record of one deployment's traffic, window by window, and what the drift test makes of it. The flow's process.

One JSON file per draft, in a folder or on S3, written whole: a reader sees the old record or the new one. The test's
state is a function of the record alone, so a restart changes nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

import fsspec

from infra.drift.scrape import Counters, Scrape
from infra.drift.sequential import LEARNED_WINDOWS, DriftTest, Statistic
from infra.files import write_atomically
from infra.records import Record


class Served(Record):
    """What must be the same for two windows to be comparable."""

    version: int
    lookahead: int
    traffic: str


class Window(Record):
    """The requests that were finished in a stretch of time."""

    served: Served
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


def mean_length(windows: Sequence[Window]) -> float:
    """Acceptance length over all of them; raises ZeroDivisionError where there is none."""
    return sum(window.tokens for window in windows) / sum(window.steps for window in windows)


class Announcement(Record):
    """An alarm that was made known."""

    window: float
    """End of the window that raised it."""
    served: Served


class TrafficRecord(Record):
    """All that is known of one draft's traffic."""

    draft: str
    served: Served | None = None
    """Of the counters."""
    counted: float = 0.0
    """When the window that is open began."""
    counters: Mapping[str, Counters] = {}
    """By server, as last read."""
    open: Counters = Counters()
    """What the window that is open has so far."""
    windows: tuple[Window, ...] = ()
    """Oldest first; those of earlier versions are kept for people."""
    before: Statistic = Statistic()
    """The test before the first window, where all windows are of the present version and conditions."""
    announced: tuple[Announcement, ...] = ()

    @property
    def current(self) -> tuple[Window, ...]:
        """The windows at the end that are of the present version and conditions."""
        count = 0
        for window in reversed(self.windows):
            if window.served != self.served:
                break
            count += 1
        return self.windows[len(self.windows) - count :]

    @property
    def previous(self) -> tuple[Window, ...]:
        """The windows just before the present ones, of one other version under the same conditions."""
        before, found = self.windows[: len(self.windows) - len(self.current)], []
        for window in reversed(before):
            same = self.served and window.served == self.served.model_copy(update={"version": window.served.version})
            if not same or window.served.version != before[-1].served.version:
                break
            found.append(window)
        return tuple(reversed(found))

    @property
    def learned(self) -> tuple[Window, ...]:
        """Windows of the version before that tell how much this traffic varies."""
        return self.previous[-LEARNED_WINDOWS:]

    @property
    def replaced(self) -> tuple[Window, ...]:
        """What the present version is compared with: windows of the version before, those that a fall in its time had
        already come to, where one was announced."""
        alarms = [one.window for one in self.announced if self.previous and one.served == self.previous[-1].served]
        return tuple(window for window in self.previous if not alarms or window.ended >= max(alarms))

    def observe(self, scrape: Scrape, served: Served, now: float, least_steps: int) -> "TrafficRecord":
        """The record after a scrape: one window more if enough verification steps have come since the last one.

        After a change of version or conditions the counters only begin anew: what lies between belongs to neither.
        A server that is seen for the first time begins to count; one that is silent is waited for.
        """
        counters = {url: reading.counters for url, reading in scrape.readings.items()}
        if served != self.served:
            anew = {"served": served, "counted": now, "counters": counters, "open": Counters()}
            return self.model_copy(update=anew)
        opened = self.open
        for url, counted in counters.items():
            if url in self.counters:
                opened = opened.plus(counted.since(self.counters[url]))
        update = {"counters": {**self.counters, **counters}, "open": opened}
        if opened.steps >= least_steps:
            window = Window(
                served=served,
                began=self.counted,
                ended=now,
                tokens=opened.tokens,
                steps=opened.steps,
                requests=opened.requests,
            )
            update |= {"windows": (*self.windows, window), "open": Counters(), "counted": now}
        return self.model_copy(update=update)

    def trimmed(self, keep: int, test: DriftTest) -> "TrafficRecord":
        """The newest `keep` windows, or some more to learn from; what the test made of the dropped ones is kept."""
        surplus, present = len(self.windows) - keep, len(self.windows) - len(self.current)
        if surplus < present:
            surplus = min(surplus, present - len(self.learned))
        if surplus <= 0:
            return self
        dropped = surplus - present
        before = judge(self, test).statistics[dropped - 1] if dropped > 0 else _before(self, test)
        before = before.anew() if test.alarms(before) else before
        return self.model_copy(update={"windows": self.windows[surplus:], "before": before})

    def due(self, verdict: "Verdict", quiet_s: float) -> Window | None:
        """The window whose alarm is to be announced now, if there is one: the last, after the version's quiet time."""
        mine = [one.window for one in self.announced if one.served == self.served]
        alarms = [self.current[index] for index in verdict.alarms]
        after = max(mine) + quiet_s if mine else float("-inf")
        return next((window for window in reversed(alarms) if window.ended > after), None)

    def with_announced(self, window: Window) -> "TrafficRecord":
        """The record in which the alarm of this window was made known."""
        return self.model_copy(
            update={"announced": (*self.announced, Announcement(window=window.ended, served=window.served))}
        )

    def event_id(self, window: Window) -> UUID:
        """Id of the event of this window's alarm: sent twice, it is one event."""
        return uuid5(NAMESPACE_URL, f"draftsmith/{self.draft}/{window.served.version}/{window.ended}")


@dataclass(frozen=True)
class Verdict:
    """What the test says of the present version's windows."""

    statistics: Sequence[Statistic]
    """After each; after an alarm the next window begins anew."""
    alarms: Sequence[int]
    """Indices of windows that raised one."""


def judge(record: TrafficRecord, test: DriftTest) -> Verdict:
    """Run the test over the record."""
    current, statistic = record.current, _before(record, test)
    statistics: list[Statistic] = []
    alarms: list[int] = []
    for index, window in enumerate(current):
        statistic = test.after(statistic, window.tokens, window.steps)
        statistics.append(statistic)
        if test.alarms(statistic):
            alarms.append(index)
            statistic = statistic.anew()
    return Verdict(statistics, alarms)


def _before(record: TrafficRecord, test: DriftTest) -> Statistic:
    """The test before the first window of `current`."""
    if len(record.current) == len(record.windows):
        return record.before
    statistic = Statistic()
    for window in record.learned:
        statistic = test.after(statistic, window.tokens, window.steps)
    return statistic.of_next_version()


class TrafficStore:
    """Where traffic records are kept."""

    def __init__(self, folder: str):
        self._files, root = fsspec.core.url_to_fs(folder)
        self._root = root.rstrip("/")
        self._local = "file" in self._files.protocol

    def read(self, draft: str) -> TrafficRecord:
        """The draft's record; an empty one where there is none yet."""
        # Another process may have written since this one listed the folder.
        self._files.invalidate_cache()
        try:
            return TrafficRecord.model_validate_json(self._files.cat_file(self._path(draft)))
        except FileNotFoundError:
            return TrafficRecord(draft=draft)

    def write(self, record: TrafficRecord) -> None:
        """Whole or not at all: a local file is renamed, an S3 object appears at its end."""
        data = json.dumps(record.model_dump(mode="json"), separators=(",", ":")).encode()
        if self._local:
            write_atomically(Path(self._path(record.draft)), data)
        else:
            self._files.pipe_file(self._path(record.draft), data)

    def _path(self, draft: str) -> str:
        return f"{self._root}/{draft}.json"
