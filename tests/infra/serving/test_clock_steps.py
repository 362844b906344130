"""A trial lasts as long as the follower watched it, whatever the clocks say."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.serving.config import CanaryConfig
from tests.infra.serving.serving_world import ServingWorld, serving_world

DAY_S = 86_400.0
LONG = CanaryConfig(steps=10**6, wait_s=600.0)


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, 1) as world:
        yield world


@pytest.mark.parametrize("clock", ["time", "monotonic"])
def test_a_clock_that_jumps_ends_no_trial(world: ServingWorld, clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock is set forward, or the machine is suspended; then the wall clock is set back."""
    world.promote(version := world.register(counts=False))
    follower, now, wall = world.follower(canary=LONG), getattr(time, clock), time.time
    while follower.state.trial is None or follower.state.trial.compared_since is None:
        follower.round()
    with monkeypatch.context() as patch:
        patch.setattr(time, clock, lambda: now() + DAY_S)
        for _ in range(3):
            follower.round()
    assert follower.state.trial is not None, world.said
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() - DAY_S)
        follower = world.follower(canary=CanaryConfig(steps=10**6, wait_s=0.5))
        world.settle(follower, timeout_s=20.0)
    assert follower.state.trial is None
    assert world.running() == [version]
