"""Weights that a follower loads into running servers, over stand-ins."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from infra.serving.config import ServerConfig
from infra.serving.rollout import RolloutState, ServerStep
from infra.tracking.registry import history
from tests.infra.serving.serving_world import DRAFT, Clients, ServingWorld, serving_world, with_options
from tests.infra.serving.test_follower import TRAFFIC


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, 2) as world:
        world.swaps = True
        yield world


def starts(world: ServingWorld) -> int:
    """Servers started so far."""
    return sum("starts with" in line for line in world.said)


def test_a_version_with_other_weights_is_loaded_without_a_restart(world: ServingWorld) -> None:
    first, second = world.register(2.0, in_weights=True), world.register(2.5, in_weights=True)
    world.promote(first)
    world.settle(world.follower())
    before, processes = starts(world), {process.pid for process in world.servers()}
    with Clients(world.ports) as clients:
        world.promote(second)
        world.settle(world.follower(canary=TRAFFIC))
    assert world.running() == [second] * 2
    assert (starts(world), {process.pid for process in world.servers()}) == (before, processes)
    assert (clients.lost, clients.retried, clients.least_healthy) == ([], 0, 2)
    world.settle(world.follower())  # another follower finds them as they are
    assert starts(world) == before


def test_a_version_that_accepts_less_leaves_as_it_came(world: ServingWorld) -> None:
    good, bad = world.register(2.5, in_weights=True), world.register(1.75, promised=2.5, in_weights=True)
    world.promote(good)
    world.settle(world.follower())
    before = starts(world)
    world.promote(bad)
    world.settle(world.follower())
    assert (world.running(), world.champion(), starts(world)) == ([good] * 2, good, before)
    assert "when it was benchmarked" in history(world.uri, DRAFT)[-1].reason


@pytest.mark.slow
def test_a_server_that_dies_after_a_swap_returns_with_its_version(world: ServingWorld) -> None:
    first, second = world.register(2.0, in_weights=True), world.register(2.5, in_weights=True)
    follower = world.follower()
    for version in (first, second):
        world.promote(version)
        world.settle(follower)
    (victim,) = (process for process in world.servers() if str(world.ports[1]) in process.cmdline())
    victim.kill()
    victim.wait(10)
    world.settle(follower)
    assert world.running() == [second] * 2
    assert f"http://127.0.0.1:{world.ports[1]} starts with version {second}" in world.said


def test_a_server_whose_swap_was_interrupted_is_restarted(world: ServingWorld) -> None:
    """The follower was killed after it had told the server to pause: its weights may be anything."""
    first, second = world.register(2.0, in_weights=True), world.register(2.5, in_weights=True)
    world.promote(first)
    world.settle(world.follower())
    world.promote(second)
    url = f"http://127.0.0.1:{world.ports[0]}"
    httpx.post(f"{url}/pause_generation", json={"mode": "retract"}).raise_for_status()
    file = world.folder / "served" / DRAFT / "state.json"
    file.write_text(RolloutState.read(file).model_copy(update={"swapping": (url,)}).model_dump_json())
    before = starts(world)
    world.settle(world.follower())
    assert world.running() == [second] * 2
    assert starts(world) == before + 1
    assert RolloutState.read(file).swapping == ()


def test_servers_that_refuse_weights_are_restarted(world: ServingWorld) -> None:
    first, second = (world.register(length, in_weights=True, frozen=True) for length in (2.0, 2.5))
    world.promote(first)
    world.settle(world.follower())
    before = starts(world)
    with Clients(world.ports) as clients:
        world.promote(second)
        world.settle(world.follower())
    assert world.running() == [second] * 2
    assert starts(world) == before + 2
    assert any("update_weights_from_tensor: 400" in line for line in world.said), "it was asked"
    assert clients.lost == []


def test_which_servers_are_sent_no_weights(world: ServingWorld) -> None:
    """Where that is switched off, and where afterwards one of several processes would report it."""
    servers = with_options(world, "--tokenizer-worker-num 2")[:1]
    first, second = world.register(2.0, in_weights=True), world.register(2.5, in_weights=True)
    world.promote(first)
    world.settle(follower := world.follower(servers=servers))
    (several,) = follower._fleet.look(follower.state)
    assert several.report is not None
    assert several.report.workers == 2
    one, step = replace(several, report=replace(several.report, workers=1)), ServerStep("stop", servers[0].url, second)
    assert not follower._swap(step, [several])
    assert not world.follower(servers=servers, swap=False)._swap(step, [one])
    assert world.running()[0] == first
    assert follower._swap(step, [one])
    assert world.running()[0] == second


def test_a_supervisors_next_start_is_with_the_swapped_version(world: ServingWorld) -> None:
    folder, (port, *_) = world.folder / "served", world.ports
    file = folder / "servers" / f"127.0.0.1-{port}.env"
    server = ServerConfig(url=f"http://127.0.0.1:{port}", restart="true")
    own = world.config().servers[0]
    first, second = world.register(2.0, in_weights=True), world.register(2.5, in_weights=True)
    world.promote(first)
    world.settle(world.follower(servers=(own,)))
    follower = world.follower(servers=(server,))
    world.promote(second)
    world.settle(follower)
    assert world.running()[0] == second
    assert f"{DRAFT}/{second} " in file.read_text()
