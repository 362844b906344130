"""A series of windows: what closes one, and that its test is a function of the series alone."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.drift.scrape import Counters
from infra.drift.sequential import DriftTest, Reference
from infra.drift.traffic import Series, ServedSeries, judge

SERVED = ServedSeries(version=3, lookahead=4, traffic="greedy")
REQUESTS = [(24 + i % 7 - 3, 10) for i in range(200)]
TEST = DriftTest(Reference.of(REQUESTS), 0.1, 5000)


def counted(requests: int, length: float = 2.4) -> Counters:
    """Requests of ten steps each, first tokens included in what was generated."""
    return Counters(generated=round(requests * (1 + 10 * length)), requests=requests, steps=10 * requests)


def series_of(*added: Counters, least: int = 100) -> Series:
    series = Series(served=SERVED, opened=0.0)
    for hour, counters in enumerate(added, start=1):
        series = series.counting(counters, 3600.0 * hour, least)
    return series


def fallen(windows: int) -> Series:
    """Thirty good windows, then worse ones."""
    wobbles = [0.02 * (index % 3 - 1) for index in range(30 + windows)]
    return series_of(*(counted(100, (2.4 if i < 30 else 2.1) + wobble) for i, wobble in enumerate(wobbles)))


def test_windows_hold_what_verification_steps_emitted():
    series = series_of(counted(50), counted(80))
    assert [(w.tokens, w.steps, w.requests) for w in series.windows] == [(1200, 500, 50), (1920, 800, 80)]
    assert [(w.began, w.ended) for w in series.windows] == [(0.0, 3600.0), (3600.0, 7200.0)]
    assert series.windows[0].length == pytest.approx(2.4)


def test_too_little_traffic_is_not_a_window():
    (window,) = series_of(counted(4), counted(5), counted(3)).windows
    assert (window.requests, window.began, window.ended) == (12, 0.0, 3 * 3600.0)


def test_a_window_does_not_span_the_time_without_a_server():
    series = series_of(counted(4)).paused(50_000.0)
    (window,) = series.counting(counted(20), 60_000.0, 100).windows
    assert (window.requests, window.began) == (20, 50_000.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(10, 60), st.floats(1.8, 2.8)), min_size=2, max_size=60),
    st.integers(1, 70),
    st.integers(0, 30),
)
def test_dropping_old_windows_changes_no_verdict(rows: list[tuple[int, float]], keep: int, learned: int):
    """The same statistics and alarms for the windows that are left, however often old ones are dropped."""
    whole = kept = Series(served=SERVED, opened=0.0, learned=fallen(0).windows[:learned])
    for index, (requests, length) in enumerate(rows, start=1):
        whole, kept = (one.counting(counted(requests, length), float(index), 100) for one in (whole, kept))
        kept = kept.trimmed(keep, TEST)
        assert len(kept.windows) <= keep
    expected, found = judge(whole, TEST), judge(kept, TEST)
    assert kept.num_windows == whole.num_windows
    assert list(found.statistics) == list(expected.statistics[-len(kept.windows) :])
    assert list(found.alarms) == [i - kept.dropped for i in expected.alarms if i >= kept.dropped]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=20), st.integers(1, 500))
def test_no_request_is_lost_or_counted_twice(added: list[int], least: int):
    series = series_of(*map(counted, added), least=least)
    assert sum(window.requests for window in series.windows) + series.open.requests == sum(added)
    assert all(window.steps >= least for window in series.windows)
    assert all(one.ended == other.began for one, other in pairwise(series.windows))


def test_an_alarm_is_announced_once_and_again_after_the_quiet_time():
    series = fallen(40)
    verdict = judge(series, TEST)
    first = series.windows[verdict.alarms[0]]
    assert verdict.alarms[0] >= 30
    announced = series.with_announced(first)
    again = announced.due(judge(announced, TEST), 5 * 3600.0)
    assert again is not None
    assert again.ended > first.ended + 5 * 3600.0
    assert announced.due(judge(announced, TEST), 1000 * 3600.0) is None
    newest = series.due(verdict, 0.0)
    assert newest is not None
    after = series.with_announced(newest)
    assert after.due(judge(after, TEST), 0.0) is None
