"""Servers as their operators run them: behind keys and proxies, started by units that forget something."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from infra.serving.config import ServerConfig
from infra.serving.control import control_of
from infra.serving.follower import Follower
from infra.serving.rollout import MAX_FAILURES
from tests.infra.serving.serving_world import SETTLED_S, STAND_IN, ServingWorld, serving_world, with_options


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str, request: pytest.FixtureRequest) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, getattr(request, "param", 3)) as world:
        yield world


def rounds_until(follower: Follower, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLED_S
    while not done():
        follower.round()
        assert time.monotonic() < deadline


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


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_command_that_forgets_the_arguments_is_not_run_again_and_again(world: ServingWorld) -> None:
    server = world.config().servers[0]
    forgets = server.model_copy(update={"command": f"sh -c 'exec {server.command} --enable-metrics'"})
    world.promote(version := world.register())
    follower = world.follower(servers=(forgets,))
    rounds_until(follower, lambda: any("runs no draft, although" in line for line in world.said))
    for _ in range(10):
        follower.round()
    assert world.running() == [0]
    assert sum("starts with" in line for line in world.said) == 1
    assert sum("although it was started with version 1" in line for line in world.said) == 1
    world.settle(world.follower())
    assert world.running() == [version]
    assert world.champion() == version


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_program_that_is_away_for_a_while_ends_neither_the_follower_nor_the_trial(
    world: ServingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the servers' environment is replaced: what runs goes on, and the new version is not to blame."""
    monkeypatch.setattr("infra.serving.fleet.BACKOFF_S", 0.01)
    program, away = world.folder / "program", world.folder / "away"
    program.write_text('#!/bin/sh\nexec "$@"\n')
    program.chmod(0o755)
    servers = tuple(one.model_copy(update={"command": f"{program} {one.command}"}) for one in world.config().servers)
    world.promote(before := world.register(2.0))
    follower = world.follower(servers=servers)
    world.settle(follower)
    world.promote(version := world.register(2.5))
    program.rename(away)
    rounds_until(follower, lambda: any(f"{program} is not found" in line for line in world.said))
    for _ in range(3):
        follower.round()
    assert world.running() == [before, before]
    assert sum(f"{program} is not found" in line for line in world.said) == 1
    (canary,) = (process for process in world.servers() if str(world.ports[0]) in process.cmdline())
    canary.kill()
    canary.wait(10)
    rounds_until(follower, lambda: sum("cannot be started" in line for line in world.said) > MAX_FAILURES)
    assert world.running() == [None, before]
    assert world.champion() == version
    away.rename(program)
    world.settle(follower)
    assert world.running() == [version] * 2


@pytest.mark.parametrize("world", [1], indirect=True)
def test_starts_that_fail_leave_the_log_of_what_died_before(world: ServingWorld) -> None:
    (server,) = world.config().servers
    control = control_of(server.model_copy(update={"command": f"sh -c 'cat {world.folder}/output'"}), world.config())
    log = world.folder / "served" / "logs" / f"{server.name}.log"
    for output in ("the crash", "no start", "no start either"):
        (world.folder / "output").write_text(output)
        control.start(())
        deadline = time.monotonic() + SETTLED_S
        while control.age() is not None:
            assert time.monotonic() < deadline
    assert "the crash" in log.read_text()


@pytest.fixture
def supervised(world: ServingWorld) -> Iterator[Callable[[str], ServerConfig]]:
    """A server of another supervisor, whose unit is a shell script: `supervised(SCRIPT)`.

    In the script `$OLD` is the process that runs, `new` starts another one, and its arguments are `$DRAFT_ARGUMENTS`.
    """
    (port,), unit, pid = world.ports, world.folder / "restart.sh", world.folder / "pid"
    environment = world.folder / "served" / "servers" / f"127.0.0.1-{port}.env"

    def write(script: str) -> ServerConfig:
        unit.write_text(
            f"echo run >> {world.folder}/runs\nOLD=$(cat {pid} 2>/dev/null)\n"
            f"DRAFT_ARGUMENTS=$(sed s/^DRAFT_ARGUMENTS=// {environment})\n"
            f"new() {{ {STAND_IN} --port {port} --enable-metrics $* & echo $! > {pid}; }}\n"
            f"old() {{ kill -9 $OLD; while kill -0 $OLD; do sleep 0.05; done; }}\n{script}\n"
        )
        return ServerConfig(url=f"http://127.0.0.1:{port}", restart=f"bash {unit}")

    yield write
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def runs_of(world: ServingWorld) -> int:
    """How often the supervisor was asked."""
    return len((world.folder / "runs").read_text().splitlines())


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_unit_that_forgets_the_arguments_is_not_restarted_again_and_again(
    world: ServingWorld, supervised: Callable[[str], ServerConfig]
) -> None:
    server = supervised("[ -z $OLD ] || old; new")
    world.promote(version := world.register())
    follower = world.follower(servers=(server,), unhealthy_s=0.1)
    rounds_until(follower, lambda: any("runs no draft, although" in line for line in world.said))
    for _ in range(10):
        follower.round()
    assert (world.running(), runs_of(world)) == ([0], 1)
    supervised("old; new $DRAFT_ARGUMENTS")
    (environment,) = (world.folder / "served" / "servers").iterdir()
    os.utime(environment, (0, 0))  # its operator took some time
    world.settle(world.follower(servers=(server,)))
    assert (world.running(), runs_of(world)) == ([version], 2)


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_supervisor_that_takes_its_time_is_asked_once(
    world: ServingWorld, supervised: Callable[[str], ServerConfig]
) -> None:
    """What ran before answers for a while after the command has ended."""
    world.promote(world.register(2.0))
    server = supervised("new $DRAFT_ARGUMENTS")
    world.settle(world.follower(servers=(server,), unhealthy_s=0.1))
    world.promote(version := world.register(2.5))
    go = world.folder / "go"
    supervised(f"(while ! [ -f {go} ]; do sleep 0.05; done; old; new $DRAFT_ARGUMENTS) > /dev/null 2>&1 &")
    follower = world.follower(servers=(server,))
    rounds_until(follower, lambda: runs_of(world) == 2)
    for _ in range(10):
        follower.round()
    go.touch()
    world.settle(follower)
    assert (world.running(), runs_of(world)) == ([version], 2)


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_restart_that_fails_is_tried_again_later(
    world: ServingWorld, supervised: Callable[[str], ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.serving.fleet.BACKOFF_S", 300.0)
    server = supervised("new $DRAFT_ARGUMENTS")
    world.promote(before := world.register(2.0))
    world.settle(world.follower(servers=(server,), unhealthy_s=0.1))
    world.promote(version := world.register(2.5))
    supervised("exit 1")
    follower = world.follower(servers=(server,))
    rounds_until(follower, lambda: runs_of(world) == 2)
    for _ in range(10):
        follower.round()
    assert (world.running(), runs_of(world)) == ([before], 2)
    supervised("old; new $DRAFT_ARGUMENTS")
    world.settle(world.follower(servers=(server,)))  # which knows of no failure
    assert (world.running(), runs_of(world)) == ([version], 3)


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_dead_server_whose_restart_fails_is_restarted_again_before_a_start_times_out(
    world: ServingWorld, supervised: Callable[[str], ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.serving.fleet.BACKOFF_S", 0.01)
    server = supervised("exit 1")
    world.promote(version := world.register())
    follower = world.follower(servers=(server,), unhealthy_s=0.1, start_timeout_s=86_400)
    rounds_until(follower, lambda: any("non-zero exit status" in line for line in world.said))
    supervised("new $DRAFT_ARGUMENTS")
    world.settle(follower)
    assert (world.running(), world.champion()) == ([version], version)


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_restart_for_new_arguments_alone_that_fails_is_tried_again(
    world: ServingWorld, supervised: Callable[[str], ServerConfig]
) -> None:
    """Version and address of the server tell nothing then, and the file of its arguments holds the new ones."""
    server = supervised("new $DRAFT_ARGUMENTS")
    world.promote(version := world.register())
    world.settle(world.follower(servers=(server,), unhealthy_s=0.1))
    changed = {"servers": (server,), "arguments": ("--speculative-algorithm", "EAGLE")}
    supervised("exit 1")
    follower = world.follower(**changed)
    rounds_until(follower, lambda: runs_of(world) == 2)
    assert not follower.round()
    supervised("old; new $DRAFT_ARGUMENTS")
    world.settle(world.follower(**changed))  # which knows of no failure but by the state
    assert (world.running(), runs_of(world)) == ([version], 3)


@pytest.mark.parametrize("world", [1], indirect=True)
@pytest.mark.timeout(120)
def test_a_follower_that_is_started_without_mlflow_starts_dead_servers(world: ServingWorld) -> None:
    """MLflow's own client would try for four minutes to find a version, and again."""
    world.promote(version := world.register())
    world.settle(world.follower())
    for process in world.servers():
        process.kill()
        process.wait(10)
    world.uri = "http://127.0.0.1:9"
    follower = world.follower()
    rounds_until(follower, lambda: world.running() == [version])
    assert any("served unchecked: the registry does not answer" in line for line in world.said)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_canary_that_is_too_busy_for_prompts_is_not_the_version_s_fault(world: ServingWorld) -> None:
    full = world.folder / "full"
    follower = world.follower(servers=with_options(world, f"--full {full}"))
    world.promote(world.register(2.0))
    world.settle(follower)
    world.promote(version := world.register(2.5))
    full.touch()
    rounds_until(follower, lambda: any("is too busy for prompts (503)" in line for line in world.said))
    for _ in range(5):
        follower.round()
    full.unlink()
    world.settle(follower)
    assert world.running() == [version] * 2
    assert world.champion() == version
