"""Servers as their operators run them: behind keys and proxies, started by units that forget something."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.serving.config import ServerConfig
from tests.infra.serving.serving_world import ServingWorld, serving_world


@pytest.fixture
def world(path_in_memory: Path, request: pytest.FixtureRequest) -> Iterator[ServingWorld]:
    with serving_world(
        path_in_memory, f"sqlite:///{path_in_memory / 'mlflow.db'}", getattr(request, "param", 3)
    ) as world:
        yield world


def with_options(world: ServingWorld, options: str) -> tuple[ServerConfig, ...]:
    """The servers, started with further arguments."""
    servers = world.config().servers
    return tuple(one.model_copy(update={"command": f"{one.command} {options}"}) for one in servers)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_servers_that_refuse_the_key_are_left_alone(world: ServingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key was changed, and the follower was not told: its users are served all the same."""
    world.promote(world.register())
    servers = with_options(world, "--api-key secret")
    monkeypatch.setenv("DRAFTSMITH_SGLANG_API_KEY", "secret")
    world.settle(world.follower(servers=servers))
    served = {process.pid for process in world.servers()}
    monkeypatch.setenv("DRAFTSMITH_SGLANG_API_KEY", "old")
    follower = world.follower(servers=servers, unhealthy_s=0.01, start_timeout_s=0.01)
    for _ in range(10):
        follower.round()
    assert {process.pid for process in world.servers()} == served
    assert sum("401 Unauthorized: set $DRAFTSMITH_SGLANG_API_KEY" in line for line in world.said) == 2
    monkeypatch.setenv("DRAFTSMITH_SGLANG_API_KEY", "secret")
    world.settle(world.follower(servers=servers))
    assert {process.pid for process in world.servers()} == served
