"""The windows of one version's traffic, and what the drift test makes of them.

The test's state is a function of the series alone, so a restart of the watch changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.drift.scrape import Counters
from infra.drift.sequential import DriftTest, Statistic
from infra.records.data_path import Record


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
                "announced": tuple(end for end in self.announced if end >= self.windows[surplus].began)
                or self.announced[-1:],
            }
        )

    def due(self, verdict: "DriftVerdict", quiet_s: float) -> TrafficWindow | None:
        """The newest window whose alarm has to be announced; None during the quiet time after an announcement."""
        after = max(self.announced) + quiet_s if self.announced else float("-inf")
        alarms = [self.windows[index] for index in verdict.alarms]
        return next((window for window in reversed(alarms) if window.ended > after), None)

    def with_announced(self, window: TrafficWindow) -> "Series":
        """The series in which the alarm of this window was made known."""
        return self.model_copy(update={"announced": (*self.announced, window.ended)})


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
    if series.learned:
        for window in series.learned:
            statistic = test.after(statistic, window.tokens, window.steps)
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
