"""Rollouts of a better version, in simulated months: the short form of benchmarks/rollout.py."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def rollout() -> Any:
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "rollout.py")))


@pytest.fixture(scope="module")
def rows(rollout: Any) -> Any:
    return rollout.recorded(BENCHMARKS / "results" / "drift_requests.json")


@pytest.mark.parametrize("seed", range(4))
def test_a_better_version_that_is_rolled_out_slowly_calls_for_nothing(rollout: Any, rows: Any, seed: int):
    assert rollout.live(rollout.promoted_month(rows, 0.10, seed)) == []


def test_taking_the_registrys_word_retrains_for_nothing(rollout: Any, rows: Any):
    """The simulation can fail: as if every server ran the champion at once."""
    events = rollout.live(rollout.promoted_month(rows, 0.25, 1, registry_decides=True))
    assert events
    assert events[0]["event"] == "drifted"


@pytest.mark.parametrize("seed", range(3))
def test_a_fall_after_the_rollout_is_seen(rollout: Any, rows: Any, seed: int):
    (event,) = rollout.live(rollout.promoted_month(rows, 0.10, seed, fall=0.10))
    assert (event["event"], event["version"]) == ("drifted", 2)
    assert event["windows_after_fall"] < 30


@pytest.mark.parametrize("seed", range(3))
def test_a_worse_version_is_rolled_back(rollout: Any, rows: Any, seed: int):
    served = {1: rows, 2: rollout.scaled(rows, -0.10, seed)}
    benchmarks = {1: rows, 2: rollout.scaled(rows, 0.10, 0)}
    events = rollout.live(rollout.Month(served, benchmarks, rollout.ROLLOUTS[seed], seed))
    assert (events[0]["event"], events[0]["version"]) == ("degraded", 2)
