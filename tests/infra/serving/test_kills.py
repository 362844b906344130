"""Rollouts in which follower, servers and registry are killed at random: each ends as the registry says.

The whole proof has 50 seeds over real SGLang servers (benchmarks/follower.py); this is its short form.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.infra.serving.serving_world import SETTLED_S, Clients, ServingWorld, serving_world, start_follower

SEEDS = (1,)
KILLS = 6


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, 3) as world:
        yield world


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_any_point_a_rollout_ends_as_the_registry_says(world: ServingWorld, seed: int) -> None:
    draws = random.Random(seed)
    settings, log = world.folder / "follow.yaml", world.folder / "follower.log"
    good = world.register(2.5)
    other = world.register(*draws.choice([(2.6, None), (1.1, 2.6), (1.75, None)]))
    world.promote(good)
    follower = start_follower(world, settings, log)
    try:
        wait_for(world, log)
        with Clients(world.ports) as clients:
            world.promote(other)
            for _ in range(KILLS):
                time.sleep(draws.uniform(0.0, 1.5))
                follower = kill_something(world, follower, draws, settings, log)
            if follower.poll() is not None:
                follower = start_follower(world, settings, log)
            wait_for(world, log)
    finally:
        follower.kill()
        follower.wait()
    assert len(set(world.running())) == 1, "no mixed state"
    assert clients.lost == []
    assert clients.sent > 100


def kill_something(
    world: ServingWorld, follower: subprocess.Popen[bytes], draws: random.Random, settings: Path, log: Path
) -> subprocess.Popen[bytes]:
    """The follower, which comes back, or one server where all others are healthy."""
    running = world.running()
    if None not in running and draws.random() < 0.4:
        victim = draws.choice(world.servers())
        os.kill(victim.pid, signal.SIGKILL)
        return follower
    follower.kill()
    follower.wait()
    return start_follower(world, settings, log)


def wait_for(world: ServingWorld, log: Path) -> None:
    """Until every server runs the registry's champion, twice in a row."""
    deadline, before = time.monotonic() + SETTLED_S, None
    while True:
        champion = world.champion()
        now = (champion, tuple(world.running()))
        if now == before and set(now[1]) == {champion}:
            return
        before = now
        assert time.monotonic() < deadline, f"{now} after\n{log.read_text()[-3000:]}"
        time.sleep(0.5)


def test_a_second_follower_is_refused(world: ServingWorld) -> None:
    settings, log = world.folder / "follow.yaml", world.folder / "follower.log"
    world.promote(world.register())
    first = start_follower(world, settings, log)
    try:
        wait_for(world, log)
        second = start_follower(world, settings, world.folder / "second.log")
        assert second.wait(60) == 2
        assert "another follower uses" in (world.folder / "second.log").read_text()
        psutil.Process(first.pid).terminate()
        assert first.wait(60) == 0
        assert world.running() == [1] * 3, "servers outlive it"
    finally:
        first.kill()
        first.wait()
