"""Whose fault an alarm is: the traffic's, or the version's that has just begun to serve."""

import numpy as np
import pytest

from infra.drift.sequential import DriftTest, Reference
from infra.drift.windows import Announcement, Served, TrafficRecord, Window, judge
from infra.results import RegisteredDraft
from infra.tracking.registry import REPLACES
from tasks.drift import Finding

TEST = DriftTest(Reference(np.array([(24 + i % 7 - 3, 10) for i in range(200)], dtype=np.float64)), 0.1, 5000)


def windows(version: int, began: int, *lengths: float) -> tuple[Window, ...]:
    served = Served(version=version, lookahead=4, traffic="greedy")
    return tuple(
        Window(served=served, began=at, ended=at + 1, tokens=round(1000 * length), steps=1000, requests=100)
        for at, length in enumerate(lengths, start=began)
    )


@pytest.mark.parametrize(
    ("announced", "now", "fault"),
    [
        (False, 2.0, True),
        (False, 2.3, False),  # 4 % below what the version before reached: less than half of the fall
        (True, 2.0, False),  # as the version before since its alarm
        (True, 1.7, True),
    ],
)
def test_a_version_is_blamed_for_what_it_loses(announced: bool, now: float, fault: bool):
    before = windows(1, 0, *[2.4] * 20, *([2.0] * 3 if announced else []))
    after = windows(2, 100, now, now)
    alarms = (Announcement(window=21.0, served=before[-1].served),) if announced else ()
    record = TrafficRecord(draft="d", served=after[-1].served, windows=(*before, *after), announced=alarms)
    draft = RegisteredDraft(name="d", version=2, model_id="m", aliases=("champion",), tags={REPLACES: "1"})
    finding = Finding(draft, record, TEST, judge(record, TEST), None)
    assert finding.is_the_versions_fault(50) is fault
    assert not finding.is_the_versions_fault(1), "after its probation it is the traffic"
