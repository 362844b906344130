"""What an alarm calls for: the champion's own windows, and which servers run it, decide."""

import pytest

from infra.drift.config import WatchConfig
from infra.drift.decision import DriftFinding, assess
from infra.drift.scrape import Counters
from infra.drift.target import ReportedTarget
from infra.drift.traffic import Leading, Series, ServedSeries, ServerState, TrafficRecord, TrafficWindow
from infra.records.acceptance import RegisteredDraft
from infra.tracking.registry import REPLACES
from tests.infra.drift.test_series import TEST

CONFIG = WatchConfig(draft="d", servers=("http://a",))
HOUR_S = 3600.0
WINDOW_S = 8 * HOUR_S


def series(
    version: int, began: int, *lengths: float, learned: tuple[TrafficWindow, ...] = (), each_s: float = WINDOW_S
) -> Series:
    windows = tuple(
        TrafficWindow(
            began=start * each_s, ended=(start + 1) * each_s, tokens=round(1000 * length), steps=1000, requests=100
        )
        for start, length in enumerate(lengths, start=began)
    )
    served = ServedSeries(version=version, lookahead=4, traffic="greedy")
    return Series(served=served, opened=0.0, windows=windows, learned=learned)


def with_lookahead(lookahead: int, one: Series) -> Series:
    return one.model_copy(update={"served": one.served.model_copy(update={"lookahead": lookahead})})


def draft(version: int, *aliases: str) -> RegisteredDraft:
    tags = {REPLACES: "1"} if version == 2 else {}
    return RegisteredDraft(name="d", version=version, model_id="m", aliases=aliases, tags=tags)


def found(
    *all_series: Series,
    leading: Leading | None,
    config: WatchConfig = CONFIG,
    champion: int = 2,
    newest: int | None = None,
) -> DriftFinding:
    """What is found of the last of them."""
    record = TrafficRecord(draft="d", series=all_series, leading=leading)
    served = all_series[-1]
    return assess(record, served, draft(served.served.version), draft(champion), TEST, config, newest=newest)


@pytest.mark.parametrize(
    ("announced", "now", "event"),
    [
        (False, 1.7, "degraded"),
        (True, 1.9, "drifted"),  # as the version before since its alarm
        (True, 1.5, "degraded"),
    ],
)
def test_a_version_is_blamed_for_what_it_loses(announced: bool, now: float, event: str):
    before = series(1, 0, *[2.4] * 20, *([2.0] * 3 if announced else []))
    before = before.model_copy(update={"announced": (21 * WINDOW_S,) if announced else ()})
    after = series(2, 23, *[now] * 10, learned=before.windows[:20])
    leading = Leading(version=2, since=0.0)
    assert found(before, after, leading=leading).event == event
    later = CONFIG.model_copy(update={"probation_windows": 1})
    assert found(before, after, leading=leading, config=later).event == "drifted", "after its probation"


def test_a_bad_canary_is_rolled_back_though_few_servers_run_it():
    before = series(1, 0, *[2.4] * 20)
    leading = Leading(version=1, since=0.0)
    after = series(2, 20, *[1.7] * 10, learned=before.windows)
    assert found(before, after, leading=leading).event == "degraded"
    later = series(2, 100, *[1.7] * 10, learned=before.windows)
    assert found(before, later, leading=leading).event is None, "windows of weeks before say nothing of this traffic"


def test_a_version_is_on_probation_once():
    """Not again at another lookahead, where an old version served, too: a fall there calls for retraining."""
    leading = Leading(version=2, since=0.0)
    old = with_lookahead(2, series(1, 0, *[2.4] * 100))
    long = series(2, 0, *[2.4] * 100)
    new = with_lookahead(2, series(2, 100, *[2.4] * 5, *[2.0] * 10, learned=long.windows[-20:]))
    assert found(old, long, new, leading=leading).event == "drifted"
    assert found(old, new, leading=leading).event == "degraded"


def test_a_fall_that_both_versions_see_is_no_versions_fault():
    before = series(1, 0, *[2.4] * 20, *[1.7] * 10)
    after = series(2, 20, *[1.7] * 10, learned=before.windows[:20])
    assert found(before, after, leading=Leading(version=2, since=0.0)).event == "drifted"


def test_a_version_that_is_being_replaced_calls_for_nothing():
    finding = found(series(1, 0, *[2.4] * 30, *[1.7] * 10), leading=Leading(version=1, since=0.0))
    assert finding.verdict.alarms
    assert (finding.event, finding.due) == (None, None)
    assert "version 2 is champion" in finding.held


@pytest.mark.parametrize(
    "leading",
    [None, Leading(version=1, since=0.0), Leading(version=2, since=90 * WINDOW_S)],
    ids=["none", "other", "since"],
)
def test_retraining_waits_for_most_servers(leading: Leading | None):
    finding = found(series(2, 0, *[2.4] * 30, *[1.7] * 10), leading=leading)
    assert finding.verdict.alarms
    assert (finding.event, finding.due) == (None, None)
    assert finding.held
    assert found(series(2, 0, *[2.4] * 30, *[1.7] * 10), leading=Leading(version=2, since=1.0)).event == "drifted"


def test_a_swing_of_the_day_is_no_fall_that_lasts():
    """Six hours of every day lie 17 % below the benchmark, the others 2 % above."""
    day = [2.45] * 18 + [2.0] * 6
    swinging = series(2, 0, *day * 6, each_s=HOUR_S)
    leading = Leading(version=2, since=0.0)
    finding = found(swinging, leading=leading)
    assert finding.verdict.alarms, "the test of windows must have been alarmed, or this proves nothing"
    assert finding.event is None
    assert finding.held.startswith("over the last day of service it accepts 2.34, not 5% less than the benchmark's 2.4")
    fallen = series(2, 0, *day * 6, *[2.0] * 24, each_s=HOUR_S)
    assert found(fallen, leading=leading).event == "drifted"


@pytest.mark.parametrize("waited", [0.0, 48 * HOUR_S], ids=["closed", "open"])
def test_the_last_day_goes_back_over_a_weekend(waited: float):
    """The swing above, and nobody asks from Friday to Monday, whose first window began with it, or on Friday."""
    week = series(2, 0, *([2.0] * 6 + [2.45] * 18) * 5, each_s=HOUR_S)
    monday = series(2, 7 * 24, *[2.0] * 6, each_s=HOUR_S).windows
    first = monday[0].model_copy(update={"began": monday[0].began - waited})
    for windows in ((first,), (first, *monday[1:])):
        finding = found(
            week.model_copy(update={"windows": (*week.windows, *windows)}), leading=Leading(version=2, since=0.0)
        )
        assert finding.verdict.alarms
        assert (finding.event, finding.due) == (None, None)
    young = week.model_copy(update={"windows": (*week.windows[-8:], first, *monday[1:])})
    assert found(young, leading=Leading(version=2, since=0.0)).event is None


def test_a_version_is_not_retrained_before_a_day_was_seen():
    young = series(2, 0, *[2.4] * 30, *[1.7] * 10, each_s=HOUR_S / 2)
    finding = found(young, leading=Leading(version=2, since=0.0))
    assert finding.verdict.alarms
    assert finding.event is None
    assert finding.held.startswith("it has served for less than a day:")
    # A version whose first windows are not kept any more has served for long.
    assert found(young.model_copy(update={"dropped": 500}), leading=Leading(version=2, since=0.0)).event == "drifted"


def test_a_fall_that_was_made_known_is_no_reason_to_train_again():
    """Whatever became of the version that was trained, unless there is a further fall."""
    leading = Leading(version=2, since=0.0)
    first = found(series(2, 0, *[2.4] * 40, *[2.0] * 40, each_s=HOUR_S), leading=leading)
    assert first.event == "drifted"
    assert first.due
    known = first.series.with_announced(first.due, 2)
    assert known.fallen_to == pytest.approx(2.0)

    def later(length: float, newest: int = 3) -> DriftFinding:
        """Two weeks after it, at this length."""
        more = series(2, 80, *[length] * 14 * 24, each_s=HOUR_S).windows
        return found(known.model_copy(update={"windows": (*known.windows, *more)}), leading=leading, newest=newest)

    same = later(1.97)
    assert same.verdict.alarms[-1] > 80
    assert (same.event, same.due) == (None, None)
    assert same.held == "it has not fallen further than to the 2.00 of the alarm before"
    assert later(1.85).event == "drifted"
    assert later(1.97, newest=2).event == "drifted", "the retraining failed"


def test_a_fall_after_a_recovery_is_made_known():
    leading = Leading(version=2, since=0.0)
    first = found(series(2, 0, *[2.4] * 40, *[2.0] * 40, each_s=HOUR_S), leading=leading)
    assert first.due
    known = first.series.with_announced(first.due, 2)
    assert known.without_mended_fall(TEST).fallen_to == known.fallen_to

    def later(before: Series, *lengths: float) -> Series:
        more = series(2, before.num_windows, *lengths, each_s=HOUR_S).windows
        return before.model_copy(update={"windows": (*before.windows, *more)}).without_mended_fall(TEST)

    easier = known
    for _ in range(4):  # five days and a weekend
        easier = later(easier, *[2.2] * 5 * 24, *[2.4] * 2 * 24)
    assert easier.fallen_to == known.fallen_to
    back = later(known, *[2.4] * 8 * 24)
    assert back.fallen_to is None
    assert found(later(back, *[2.0] * 14 * 24), leading=leading, newest=3).event == "drifted"


def test_a_version_calls_for_one_retraining_in_the_quiet_time():
    """Whether its target changed, it fell, or it fell at another lookahead, too."""
    leading = Leading(version=2, since=0.0)
    fallen = series(2, 0, *[2.4] * 40, *[2.0] * 40, each_s=HOUR_S)
    assert found(fallen, leading=leading).event == "drifted"
    target = ReportedTarget(path="/targets/one")
    changed = TrafficRecord(draft="d", series=(fallen,), leading=leading).with_change_announced(2, target, 70 * HOUR_S)
    quiet = assess(changed, fallen, draft(2), draft(2), TEST, CONFIG)
    assert (quiet.event, quiet.due) == (None, None)
    assert quiet.held == "it came within 168 hours of an announced alarm or change of the target"
    other = changed.with_change_announced(1, target, 70 * HOUR_S)
    assert assess(other, fallen, draft(2), draft(2), TEST, CONFIG).event == "drifted", "another version's"

    announced = fallen.with_announced(fallen.windows[60])
    other_lookahead = with_lookahead(2, series(2, 0, *[2.4] * 40, *[2.0] * 60, each_s=HOUR_S))
    assert found(announced, other_lookahead, leading=leading).event is None
    later = CONFIG.model_copy(update={"quiet_hours": 10.0})
    assert found(announced, other_lookahead, leading=leading, config=later).event == "drifted"


def test_the_silent_servers_that_retraining_waits_for_are_named():
    fallen = series(2, 0, *[2.4] * 30, *[1.7] * 10)
    servers = {
        url: ServerState(start="x", version=version, lookahead=4, counters=Counters(), silent_since=silent)
        for url, version, silent in (("http://a", 2, None), ("http://b", 1, 3600.0))
    }
    record = TrafficRecord(draft="d", servers=servers, series=(fallen,))
    finding = assess(record, fallen, draft(2), draft(2), TEST, CONFIG)
    assert finding.held == (
        "most servers run another version, or have not answered for less than a day (http://b): retraining waits for "
        "the rollout"
    )
