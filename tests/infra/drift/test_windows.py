"""The record of windows: what becomes a window, and that its test is a function of the record alone."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.drift.scrape import Counters, Reading, Scrape
from infra.drift.sequential import LEARNED_WINDOWS, DriftTest, Reference
from infra.drift.windows import Served, TrafficRecord, TrafficStore, judge, mean_length

SERVED = Served(version=3, lookahead=4, traffic="greedy")
REQUESTS = [(24 + i % 7 - 3, 10) for i in range(200)]
TEST = DriftTest(Reference.of(REQUESTS), 0.1, 5000)
A, B = "http://a:30000", "http://b:30000"


def scrape(**counters: Counters) -> Scrape:
    urls = {"a": A, "b": B}
    return Scrape(readings={urls[n]: Reading(counters=c, lookahead=4, draft_tokens=5) for n, c in counters.items()})


def counted(requests: int, length: float = 2.4) -> Counters:
    """Requests of ten steps each, first tokens included in what was generated."""
    return Counters(generated=round(requests * (1 + 10 * length)), requests=requests, steps=10 * requests)


def watched(*scrapes: Scrape, least: int = 100) -> TrafficRecord:
    record = TrafficRecord(draft="d")
    for hour, one in enumerate(scrapes):
        record = record.observe(one, SERVED, 3600.0 * hour, least)
    return record


def test_windows_hold_what_verification_steps_emitted():
    record = watched(scrape(a=counted(100)), scrape(a=counted(150)), scrape(a=counted(230)))
    assert [(w.tokens, w.steps, w.requests) for w in record.windows] == [(1200, 500, 50), (1920, 800, 80)]
    assert [(w.began, w.ended) for w in record.windows] == [(0.0, 3600.0), (3600.0, 7200.0)]
    assert record.windows[0].length == pytest.approx(2.4)


def test_too_little_traffic_is_not_a_window():
    record = watched(scrape(a=counted(0)), scrape(a=counted(4)), scrape(a=counted(9)), scrape(a=counted(12)))
    (window,) = record.windows
    assert (window.requests, window.began, window.ended) == (12, 0.0, 3 * 3600.0)
    assert record.open == Counters()


def test_a_server_that_was_started_again_counts_from_zero():
    record = watched(scrape(a=counted(100)), scrape(a=counted(105)), scrape(a=counted(20)))
    (window,) = record.windows
    assert window.requests == 25


def test_servers_come_and_go():
    """A new one begins to count when it is first seen; one that is silent is waited for."""
    record = watched(
        scrape(a=counted(0)), scrape(a=counted(50), b=counted(1000)), scrape(b=counted(1020)), scrape(a=counted(70))
    )
    assert [window.requests for window in record.windows] == [50, 20, 20]


def test_another_version_begins_anew():
    record = watched(scrape(a=counted(0)), scrape(a=counted(50)))
    other = SERVED.model_copy(update={"version": 4})
    record = record.observe(scrape(a=counted(90)), other, 9000.0, 100)
    assert record.current == ()
    record = record.observe(scrape(a=counted(120)), other, 9900.0, 100)
    assert [window.requests for window in record.current] == [30]
    assert [window.served.version for window in record.windows] == [3, 4]
    (statistic,) = judge(record, TEST).statistics
    assert (statistic.windows, statistic.differences) == (2, 0), "learned from both, compared with neither"


def test_what_the_version_before_has_shown_of_the_traffic_is_not_learned_again():
    """A version that serves badly from its first window on is found within a few."""
    before, other = fallen(0), SERVED.model_copy(update={"version": 4})
    total = Counters(generated=10**6, requests=10**4, steps=10**5)
    record = before.observe(scrape(a=total), other, 10**6, 100)
    for hour in range(6):
        total = total.plus(counted(100, 1.7))
        record = record.observe(scrape(a=total), other, 10**6 + 3600.0 * hour, 100)
    assert judge(record, TEST).alarms
    conditions = {"served": SERVED.model_copy(update={"traffic": "sampled"})}
    elsewhere = tuple(window.model_copy(update=conditions) for window in before.windows)
    assert not judge(record.model_copy(update={"windows": (*elsewhere, *record.current)}), TEST).alarms


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(10, 60), st.floats(1.8, 2.8)), min_size=2, max_size=60),
    st.integers(1, 70),
    st.integers(0, 60),
)
def test_dropping_old_windows_changes_no_verdict(rows: list[tuple[int, float]], keep: int, change: int):
    """The same statistics and alarms for the windows that are left, however often old ones are dropped."""
    whole = kept = watched(scrape(a=Counters()))
    total = Counters()
    for index, (requests, length) in enumerate(rows, start=1):
        total = total.plus(counted(requests, length))
        served = SERVED.model_copy(update={"version": 4}) if index > change else SERVED
        whole, kept = (one.observe(scrape(a=total), served, float(index), 100) for one in (whole, kept))
        kept = kept.trimmed(keep, TEST)
        assert len(kept.windows) <= keep + LEARNED_WINDOWS
    expected, found = judge(whole, TEST), judge(kept, TEST)
    count = len(kept.current)
    assert list(found.statistics) == list(expected.statistics[-count:])
    assert list(found.alarms) == [
        i - len(whole.current) + count for i in expected.alarms if i >= len(whole.current) - count
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=20), st.integers(1, 500))
def test_no_request_is_lost_or_counted_twice(added: list[int], least: int):
    record, total = watched(scrape(a=Counters())), 0
    for hour, requests in enumerate(added, start=1):
        total += requests
        record = record.observe(scrape(a=counted(total)), SERVED, float(hour), least)
    assert sum(window.requests for window in record.windows) + record.open.requests == total
    assert all(window.steps >= least for window in record.windows)
    assert all(one.ended == other.began for one, other in pairwise(record.windows))


def fallen(windows: int) -> TrafficRecord:
    """Thirty good windows, then worse ones."""
    totals, scrapes = Counters(), [scrape(a=Counters())]
    for index in range(30 + windows):
        wobble = 0.02 * (index % 3 - 1)
        totals = totals.plus(counted(100, (2.4 if index < 30 else 2.1) + wobble))
        scrapes.append(scrape(a=totals))
    return watched(*scrapes)


def test_a_version_is_compared_with_what_the_one_before_reached_after_its_alarm():
    """A drift that called for the version is not its fault."""
    record = fallen(12)
    window = record.due(judge(record, TEST), 24 * 3600.0)
    assert window is not None
    other, total = SERVED.model_copy(update={"version": 4}), Counters(generated=10**6, requests=10**4, steps=10**5)
    for one in (record, record.with_announced(window)):
        assert one.replaced == ()
        after = one.observe(scrape(a=total), other, 10**6, 100)
        after = after.observe(scrape(a=total.plus(counted(100))), other, 10**6 + 1.0, 100)
        expected = one.windows if one is record else tuple(w for w in one.windows if w.ended >= window.ended)
        assert after.replaced == expected
    assert 2.0 < mean_length(expected) < 2.2


def test_an_alarm_is_announced_once():
    record = fallen(12)
    verdict = judge(record, TEST)
    assert verdict.alarms
    assert verdict.alarms[0] >= 30
    window = record.due(verdict, 24 * 3600.0)
    assert window is not None
    after = record.with_announced(window)
    assert after.due(judge(after, TEST), 24 * 3600.0) is None
    assert record.event_id(window) == after.event_id(window)


def test_a_fall_that_stays_is_announced_again_after_the_quiet_time():
    record = fallen(40)
    verdict = judge(record, TEST)
    first = record.current[verdict.alarms[0]]
    announced = record.with_announced(first)
    again = announced.due(judge(announced, TEST), 5 * 3600.0)
    assert again is not None
    assert again.ended > first.ended + 5 * 3600.0
    assert announced.due(judge(announced, TEST), 1000 * 3600.0) is None


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TrafficStore:
    if request.param == "folder":
        return TrafficStore(str(tmp_path / "drift"))
    return TrafficStore(f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}")


def test_the_record_is_kept(store: TrafficStore):
    assert store.read("d") == TrafficRecord(draft="d")
    record = fallen(3)
    store.write(record)
    assert store.read("d") == record
    later = record.with_announced(record.windows[-1])
    store.write(later)
    assert store.read("d") == later
    assert store.read("other").windows == ()
