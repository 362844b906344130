"""The record of a draft's traffic: each version's windows hold what that version served, and nothing else."""

import os
import time
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.drift.scrape import Counters, Reading, Scrape, ServedDraft
from infra.drift.sequential import LEARNED_WINDOWS
from infra.drift.store import TrafficStore, is_prompt_sample, prompts_are_gone
from infra.drift.traffic import KEEP_SERIES, TrafficRecord, judge
from tests.infra.drift.test_series import TEST, counted

A, B, C = "http://a:30000", "http://b:30000", "http://c:30000"


class Fleet:
    """Servers of several versions, looked at every hour."""

    def __init__(self, least: int = 100):
        self.record, self.hour, self.least = TrafficRecord(draft="d"), 0, least
        self.total: dict[str, Counters] = {}
        self.runs: dict[str, tuple[str, int | None]] = {}
        self.swapped: dict[str, str] = {}
        self.adaptive = False

    def start(self, url: str, version: int | None) -> None:
        """Start a server, or restart it with this version."""
        self.total[url] = Counters()
        self.runs[url] = (f"{url} {self.hour} {version}", version)

    def swap(self, url: str, version: int) -> None:
        """Give a running server another version's weights."""
        self.runs[url] = (self.runs[url][0], version)
        self.swapped[url] = f"d@{version}"

    def serve(self, url: str, requests: int, length: float = 2.4) -> None:
        self.total[url] = self.total[url].plus(counted(requests, length))

    def look(self, *silent: str, lookahead: int | None = 4, traffic: str = "greedy") -> None:
        readings = {
            url: Reading(
                counters=self.total[url],
                lookahead=lookahead,
                draft_tokens=lookahead and lookahead + 1,
                draft=ServedDraft(start=start, path="p", swapped=self.swapped.get(url), is_adaptive=self.adaptive),
            )
            for url, (start, _) in self.runs.items()
            if url not in silent
        }
        seen = Scrape(readings=readings, silent=dict.fromkeys(silent, "away"))
        versions = {url: version for url, (_, version) in self.runs.items()}
        self.record = self.record.observe(seen, versions, traffic, 3600.0 * self.hour, self.least)
        self.hour += 1

    def requests(self, version: int) -> int:
        """What the version's windows hold."""
        return sum(w.requests for s in self.record.series if s.served.version == version for w in s.windows)


def test_each_version_has_the_windows_of_its_own_servers():
    """One server is restarted with version 2, the other is not."""
    fleet = Fleet()
    for url in (A, B):
        fleet.start(url, 1)
    fleet.look()
    fleet.serve(A, 50)
    fleet.serve(B, 30)
    fleet.look()
    assert (fleet.requests(1), fleet.requests(2)) == (80, 0)
    fleet.start(B, 2)
    fleet.serve(A, 50)
    fleet.serve(B, 20)
    fleet.look()
    assert (fleet.requests(1), fleet.requests(2)) == (130, 20)


def test_an_unknown_draft_is_mixed_into_no_version():
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.start(B, None)
    fleet.look()
    for url in (A, B):
        fleet.serve(url, 50)
    fleet.look()
    assert fleet.requests(1) == 50
    assert [series.served.version for series in fleet.record.series] == [1]
    fleet.start(A, None)
    fleet.serve(A, 70)
    fleet.look()
    assert fleet.requests(1) == 50


def test_a_restarted_server_counts_from_zero_even_where_it_has_counted_more():
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.look()
    fleet.serve(A, 20)
    fleet.look()
    fleet.start(A, 1)
    fleet.serve(A, 30)
    fleet.look()
    assert fleet.requests(1) == 50


def test_what_was_counted_around_a_swap_is_of_no_version():
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.look()
    fleet.serve(A, 20)
    fleet.look()
    fleet.swap(A, 2)
    fleet.serve(A, 30)
    fleet.look()
    fleet.serve(A, 40)
    fleet.look()
    assert (fleet.requests(1), fleet.requests(2)) == (20, 40)


def test_servers_come_and_go():
    """One that is seen for the first time begins to count; a silent one is waited for."""
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.look()
    fleet.serve(A, 50)
    fleet.start(B, 1)
    fleet.serve(B, 1000)
    fleet.look()
    fleet.serve(B, 20)
    fleet.serve(A, 10)
    fleet.look(A)
    fleet.serve(A, 10)
    fleet.look()
    assert fleet.requests(1) == 90


def test_a_silent_server_ends_no_window():
    """Every second look of the watch times out at a canary; it still serves, and its windows are filled."""
    fleet = Fleet(least=1000)
    fleet.start(A, 1)
    fleet.start(B, 2)
    for number in range(10):
        fleet.look(*([B] if number % 2 else []))
        fleet.serve(B, 30)
    assert fleet.requests(2) == 240
    for _ in range(26):
        fleet.look(B)
    (left,) = (one for one in fleet.record.series if one.served.version == 2)
    assert left.opened > 10 * 3600.0, "after a day nobody waits for it"


def test_a_server_that_is_silent_for_a_day_is_forgotten():
    """It runs nothing, so it does not keep the others' version from leading."""
    fleet = Fleet()
    fleet.start(A, 2)
    fleet.start(B, 1)
    fleet.look()
    fleet.hour += 30  # the watch was paused
    for _ in range(25):
        fleet.look(B)
    assert fleet.record.silent == [B]
    assert fleet.record.leading is None
    fleet.look(B)
    assert fleet.record.leading
    assert (fleet.record.leading.version, fleet.record.silent) == (2, [])


def test_a_server_that_changes_its_lookahead_has_no_windows():
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.look()
    fleet.serve(A, 50)
    fleet.look()
    fleet.start(A, 1)
    fleet.adaptive = True
    for _ in range(2):
        fleet.serve(A, 50, 1.0)
        fleet.look()
    assert fleet.requests(1) == 50
    assert fleet.record.live("greedy") == ()
    assert fleet.record.leading, "which draft it runs is known"


def test_time_in_which_many_requests_generated_nothing_is_left_out():
    """Scoring, and the request that SGLang adds for each one with several answers: they are no lost acceptance."""
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.look()
    fleet.serve(A, 20)
    fleet.total[A] = fleet.total[A].plus(Counters(requests=100, unsure=100))
    fleet.look()
    assert (fleet.requests(1), fleet.record.servers[A].unsure) == (0, True)
    fleet.serve(A, 30)
    fleet.look()
    assert (fleet.requests(1), fleet.record.servers[A].unsure) == (30, False)


def test_a_lookahead_is_remembered_until_the_next_start():
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.look()
    fleet.serve(A, 20)
    fleet.look(lookahead=None)
    assert fleet.requests(1) == 20
    fleet.start(A, 1)
    fleet.look(lookahead=None)
    assert fleet.record.servers[A].lookahead is None


def test_a_version_leads_where_more_than_half_of_the_servers_run_it():
    fleet = Fleet()
    for url in (A, B, C):
        fleet.start(url, 1)
    fleet.look()
    fleet.start(A, 2)
    fleet.look()
    assert fleet.record.leading
    assert (fleet.record.leading.version, fleet.record.leading.since) == (1, 0.0)
    fleet.start(B, None)
    fleet.look()
    assert fleet.record.leading is None
    fleet.start(B, 2)
    fleet.look(C)
    assert fleet.record.leading
    assert (fleet.record.leading.version, fleet.record.leading.since) == (2, 3 * 3600.0)


def test_a_new_version_learns_from_the_traffic_before_it():
    """So a version that serves badly from its first window on is found within a few."""
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.look()
    for index in range(30):
        fleet.serve(A, 100, 2.4 + 0.02 * (index % 3 - 1))
        fleet.look()
    fleet.start(A, 2)
    for _ in range(6):
        fleet.serve(A, 100, 1.7)
        fleet.look()
    (live,) = fleet.record.live("greedy")
    assert live.served.version == 2
    assert len(live.learned) == LEARNED_WINDOWS
    assert judge(live, TEST).alarms
    assert not judge(live.model_copy(update={"learned": ()}), TEST).alarms


def test_windows_of_the_other_kind_of_traffic_are_not_live():
    """They were counted before the watch's `traffic` was changed, and stand against another benchmark."""
    fleet = Fleet()
    fleet.start(A, 1)
    for traffic in ("sampled", "sampled", "greedy"):
        fleet.look(traffic=traffic)
        fleet.serve(A, 100, 1.4)
    assert [len(series.windows) for series in fleet.record.series] == [1, 1]
    for traffic in ("greedy", "sampled"):
        (live,) = fleet.record.live(traffic)
        assert live.served.traffic == traffic


def test_only_the_versions_that_served_last_keep_their_series():
    fleet = Fleet()
    for version in range(1, 3 * KEEP_SERIES):
        fleet.start(A, version)
        fleet.serve(A, 20)
        fleet.look()
    kept = [series.served.version for series in fleet.record.series]
    assert kept == list(range(2 * KEEP_SERIES, 3 * KEEP_SERIES))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 60), st.sampled_from([0, 1, 2, None])), max_size=40))
def test_no_request_is_counted_for_another_version_or_twice(steps: list[tuple[str, int, int | None]]):
    """Servers serve and are restarted at random: 0 means that this one goes on."""
    fleet, expected = Fleet(least=1), {1: 0, 2: 0}
    for url in (A, B):
        fleet.start(url, 1)
    fleet.look()
    for url, requests, restarted in steps:
        if restarted != 0:
            fleet.start(url, restarted)
        fleet.serve(url, requests)
        version = fleet.runs[url][1]
        if version is not None:
            expected[version] += requests
        fleet.look()
    assert {version: fleet.requests(version) for version in expected} == expected


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TrafficStore:
    if request.param == "folder":
        return TrafficStore(str(tmp_path / "drift"))
    return TrafficStore(f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}")


def test_the_record_is_kept(store: TrafficStore):
    assert store.read("d") == TrafficRecord(draft="d")
    fleet = Fleet()
    fleet.start(A, 1)
    fleet.start(B, None)
    fleet.look()
    fleet.serve(A, 40)
    fleet.look()
    store.write(fleet.record)
    assert store.read("d") == fleet.record
    later = fleet.record.with_reported({B})
    store.write(later)
    assert store.read("d") == later
    assert store.read("other").series == ()


def test_the_record_is_a_group_s_where_the_umask_says_so(tmp_path: Path):
    before = os.umask(0o002)
    try:
        TrafficStore(str(tmp_path)).write(TrafficRecord(draft="d"))
    finally:
        os.umask(before)
    assert (tmp_path / "d" / "traffic.json").stat().st_mode & 0o777 == 0o664


def test_prompts_stand_beside_the_record_until_they_are_old(store: TrafficStore, tmp_path: Path):
    sample = tmp_path / "sampled" / "prompts-0123456789ab.jsonl"
    sample.parent.mkdir()
    sample.write_text("{}\n")
    address = store.keep_prompts("d", sample)
    assert not prompts_are_gone(address)
    assert not sample.exists()
    assert is_prompt_sample(address)
    assert address.endswith("/d/prompts-0123456789ab.jsonl")
    with fsspec.open(address) as file:
        assert file.read() == b"{}\n"
    now = time.time()
    assert store.remove_prompts("d", 60, now + 59 * 86_400) == []
    assert len(store.remove_prompts("d", 60, now + 61 * 86_400)) == 1
    assert store.remove_prompts("d", 60, now + 61 * 86_400) == []
    assert prompts_are_gone(address)
    assert not prompts_are_gone(str(tmp_path / "own.jsonl")), "not users' prompts"


@pytest.mark.parametrize(("folder", "mode"), [(0o2770, 0o640), (0o770, 0o600)])
def test_a_group_reads_prompts_where_the_folder_is_the_group_s(folder: int, mode: int, tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(folder)
    sample = tmp_path / "d" / "prompts-0123456789ab.jsonl"
    sample.touch(0o600)
    TrafficStore(str(tmp_path)).keep_prompts("d", sample)
    assert sample.stat().st_mode & 0o777 == mode
