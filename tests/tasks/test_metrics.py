"""The overview for Prometheus: what a real HTTP client reads, and that the dashboard asks for nothing else."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.refusal import Refusal
from tasks.metrics import GAUGES, PREFIX, SERVERS, kept, serving_metrics
from tasks.overview import DraftRow
from tests.tasks.test_overview import NOW, row, traffic, version

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-drafts.json"


@pytest.fixture
def rows() -> list[DraftRow]:
    used = version(1, "champion", gpu_hours="1.5", gpu_busy="0.75", cost="3.00")
    first = row(versions=[used], traffic=traffic([1.9, 2.1], announced=(NOW,)))
    return [first, replace(row(versions=[version(2)], decisions=[]), draft="draft-y")]


def read(address: str) -> dict[str, dict[tuple[str, ...], float]]:
    page = httpx.get(f"{address}/metrics", trust_env=False).raise_for_status().text
    families = text_string_to_metric_families(page)
    return {one.name: {tuple(sample.labels.values()): sample.value for sample in one.samples} for one in families}


def test_prometheus_reads_every_figure(rows: list[DraftRow]) -> None:
    with serving_metrics("127.0.0.1", 0, lambda: rows) as address:
        found = read(address)
        assert set(found) == {PREFIX + name for name in (*GAUGES, SERVERS[0])}
        champion = ("draft-x", "T")
        assert found[f"{PREFIX}champion_version"] == {champion: 1.0}
        assert found[f"{PREFIX}served_acceptance_length"] == {champion: pytest.approx(2.0)}
        assert found[f"{PREFIX}benchmarked_acceptance_length"] == {champion: 2.0}
        assert found[f"{PREFIX}drift_alarms"][champion] == 1
        assert found[f"{PREFIX}gpu_hours"] == {champion: 1.5, ("draft-y", "T"): 0.0}
        assert found[f"{PREFIX}gpu_busy_ratio"] == {champion: 0.75}
        assert found[f"{PREFIX}cost_dollars"][champion] == 3.0
        assert found[f"{PREFIX}servers"][("draft-x", "T", "1")] == 1


def test_a_port_that_is_taken_is_refused(rows: list[DraftRow]) -> None:
    with serving_metrics("127.0.0.1", 0, lambda: rows) as address:
        with (
            pytest.raises(Refusal, match="choose another --port"),
            serving_metrics("127.0.0.1", int(address.rpartition(":")[2]), lambda: rows),
        ):
            pass


def test_it_stops_while_a_scrape_waits_for_the_registry() -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow() -> list[DraftRow]:
        asked.set()
        answered.wait(120)
        return []

    with serving_metrics("127.0.0.1", 0, slow) as address:
        threading.Thread(target=httpx.get, args=(address,), kwargs={"trust_env": False}, daemon=True).start()
        assert asked.wait(120)
    answered.set()


def test_the_registry_is_not_asked_at_every_scrape(rows: list[DraftRow]) -> None:
    asked: list[int] = []

    def count() -> list[DraftRow]:
        asked.append(1)
        return rows

    read_rows = kept(count, keep_s=3600.0)
    assert read_rows() == read_rows() == rows
    assert len(asked) == 1
    always = kept(count, keep_s=-1.0)
    assert always() == always()
    assert len(asked) == 3


def test_scrapes_do_not_pile_up_before_a_registry_that_hangs() -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow() -> list[DraftRow]:
        asked.set()
        answered.wait()
        return []

    read_rows = kept(slow, wait_s=0.0)
    first = threading.Thread(target=read_rows, daemon=True)
    first.start()
    assert asked.wait(120)
    with pytest.raises(Refusal, match="still being read"):
        read_rows()
    answered.set()
    first.join()
    assert read_rows() == []


def test_a_registry_that_fails_is_not_asked_at_every_scrape() -> None:
    asked: list[int] = []

    def fails() -> list[DraftRow]:
        asked.append(1)
        raise OSError("no route to host")

    with serving_metrics("127.0.0.1", 0, fails) as address:
        for _ in range(2):
            answer = httpx.get(f"{address}/metrics", trust_env=False)
            assert (answer.status_code, "no route to host" in answer.text) == (503, True)
    assert len(asked) == 1


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = re.findall(rf"{PREFIX}\w+", json.dumps(board))
    assert {name.removeprefix(PREFIX) for name in asked} <= {*GAUGES, SERVERS[0]}
    assert set(GAUGES) - {name.removeprefix(PREFIX) for name in asked} == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
