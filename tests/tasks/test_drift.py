"""Where traffic is kept, and what a look at it announces."""

from types import SimpleNamespace
from typing import Any, cast

from infra.drift.config import WatchConfig
from infra.drift.decision import DriftFinding
from infra.drift.scrape import Counters
from infra.drift.sequential import DriftTest, Reference
from infra.drift.target import ReportedTarget
from infra.drift.traffic import DriftVerdict, Series, ServedSeries, ServerState, TrafficRecord
from infra.records.acceptance import RegisteredDraft
from tasks.drift import TargetChange, TrafficScan, traffic_markdown, watch_folders


def test_the_folder_of_each_watch_is_its_deployment_s() -> None:
    def deployment(flow: str, **config: Any) -> SimpleNamespace:
        return SimpleNamespace(entrypoint=f"flows.{flow}", parameters={"config": config})

    deployed = [
        deployment("watch_traffic.watch_traffic", draft="draft-a", folder="s3://traffic"),
        deployment("watch_traffic.watch_traffic", draft="draft-b"),
        deployment("retrain_draft.retrain", name="c"),
    ]
    client = SimpleNamespace(read_deployments=lambda limit, offset: deployed[offset:])
    assert watch_folders(cast(Any, client)) == {"draft-a": "s3://traffic", "draft-b": None}


CHAMPION = RegisteredDraft(name="d", version=2, model_id="m", aliases=("champion",), tags={})
TEST = DriftTest(Reference.of([(24 + i % 7 - 3, 10) for i in range(200)]), 0.1, 5000)


def scan(*events: str | None, changed: bool = False, unsure: bool = False) -> TrafficScan:
    """A look at a server of the champion, at a lookahead for each of these findings."""
    target = ReportedTarget(path="/targets/one")
    now = target.model_copy(update={"quantization": "fp8"}) if changed else target
    state = ServerState(start="x", version=2, lookahead=1, counters=Counters(), target=now, unsure=unsure)
    traffic = TrafficRecord(draft="d", servers={"http://a": state}, targets={2: target})
    findings = []
    for lookahead, event in enumerate(events, start=1):
        series = Series(served=ServedSeries(version=2, lookahead=lookahead, traffic="greedy"), opened=0.0)
        findings.append(DriftFinding(CHAMPION, series, TEST, DriftVerdict([], []), event=cast(Any, event)))
    config = WatchConfig(draft="d", servers=("http://a",))
    return TrafficScan(config, {2: CHAMPION}, CHAMPION, traffic, {}, findings)


def told(look: TrafficScan) -> list[str | None]:
    return ["change" if isinstance(one, TargetChange) else one.event for one in look.alarms]


def test_a_rollback_is_announced_before_what_needs_request_logs() -> None:
    assert told(scan(None, "degraded", changed=True)) == ["degraded", "change"]


def test_a_look_announces_one_reason_to_retrain() -> None:
    assert told(scan(None)) == []
    assert told(scan("drifted", "drifted")) == ["drifted"]
    assert told(scan("drifted", changed=True)) == ["change"]
    assert told(scan("drifted", "degraded")) == ["degraded"]


def test_the_page_says_whose_traffic_is_left_out() -> None:
    assert "version 2; not counted at this look: " in traffic_markdown(scan(unsure=True))
    assert "not counted" not in traffic_markdown(scan())
