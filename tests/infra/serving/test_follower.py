"""Rollouts over stand-ins for SGLang servers: what holds goes to all, what does not goes back, here and there."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from infra.refusal import Refusal
from infra.serving.config import CanaryConfig, FollowConfig, ServerConfig
from infra.serving.control import MARK
from infra.serving.follower import BY, Follower
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService
from infra.tracking.registry import history
from tests.infra.serving.serving_world import (
    ARGUMENTS,
    DRAFT,
    SETTLED_S,
    STAND_IN,
    Clients,
    ServingWorld,
    serving_world,
)

TRAFFIC = CanaryConfig(steps=1000, wait_s=SETTLED_S)


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str, request: pytest.FixtureRequest) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, getattr(request, "param", 3)) as world:
        yield world


def test_a_promoted_version_is_served_by_all_and_no_request_is_lost(world: ServingWorld) -> None:
    first, second = world.register(2.0), world.register(2.5)
    world.promote(first)
    world.settle(world.follower())
    follower = world.follower(canary=TRAFFIC)
    assert world.running() == [first] * 3
    with Clients(world.ports) as clients:
        world.promote(second)
        world.settle(follower)
    assert world.running() == [second] * 3
    assert clients.lost == []
    assert clients.least_healthy >= 2
    assert any("holds" in line and "on live traffic" in line for line in world.said)
    assert not (world.folder / "served" / "draft-served" / "3").exists()


@pytest.mark.parametrize(
    ("worth", "why"),
    [
        pytest.param({"broken": True}, "or did not start, 3 times", marks=pytest.mark.slow),
        ({"length": 1.05, "promised": 2.6}, "when it was benchmarked"),
        ({"length": 1.75}, "of the version before it"),
    ],
    ids=["broken weights", "wrong layout flag", "30 % lower"],
)
def test_a_bad_version_goes_back_in_the_canary_phase(world: ServingWorld, worth: dict[str, Any], why: str) -> None:
    follower = world.follower()
    good, bad = world.register(2.5), world.register(**worth)
    world.promote(good)
    world.settle(follower)
    with Clients(world.ports) as clients:
        world.promote(bad)
        world.settle(follower)
    assert world.running() == [good] * 3
    assert world.champion() == good
    last = history(world.uri, DRAFT)[-1]
    assert (last.version, last.outcome, last.by) == (bad, "rolled back", BY)
    assert why in last.reason
    assert clients.lost == []
    assert clients.least_healthy >= 2
    assert sum(f"version {bad}" in line and "starts with" in line for line in world.said) <= 3


def test_a_version_without_prompts_is_judged_by_live_traffic(world: ServingWorld) -> None:
    good, bad = world.register(2.5), world.register(1.75, counts=False)
    world.promote(good)
    world.settle(world.follower())
    follower = world.follower(canary=TRAFFIC)
    world.promote(bad)
    with Clients(world.ports):
        world.settle(follower)
    assert world.running() == [good] * 3
    assert "on live traffic" in history(world.uri, DRAFT)[-1].reason


def test_a_version_whose_canary_keeps_dying_goes_back(world: ServingWorld) -> None:
    good, bad = world.register(2.5), world.register(2.5)
    world.promote(good)
    world.settle(world.follower())
    follower = world.follower(canary=CanaryConfig(steps=10**6, wait_s=600.0))
    world.promote(bad)
    deadline = time.monotonic() + 60
    while world.champion() == bad and time.monotonic() < deadline:
        follower.round()
        if world.running()[0] == bad and follower.state.trial and follower.state.trial.probed:
            for process in world.servers():
                if str(world.ports[0]) in process.cmdline():
                    process.kill()
                    process.wait(10)
    world.settle(follower)
    assert world.running() == [good] * 3
    assert "died with it" in history(world.uri, DRAFT)[-1].reason


@pytest.mark.parametrize("world", [1, 2], indirect=True)
def test_a_command_that_starts_no_server_is_not_the_version_s_fault(
    world: ServingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.serving.fleet.BACKOFF_S", 0.1)
    good = world.register(2.5)
    world.promote(good)
    servers = tuple(ServerConfig(url=f"http://127.0.0.1:{port}", command="false") for port in world.ports)
    follower = world.follower(servers=servers)
    deadline = time.monotonic() + 60
    while not any("no server has started so far" in line for line in world.said) and time.monotonic() < deadline:
        follower.round()
    for _ in range(20):
        follower.round()
    assert any("no server has started so far" in line for line in world.said)
    assert world.champion() == good
    world.settle(world.follower())
    assert world.running() == [good] * len(world.ports)
    assert all(one.outcome != "rolled back" for one in history(world.uri, DRAFT))


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_first_version_that_does_not_start_goes_back_once_the_server_starts_without(
    world: ServingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.serving.fleet.BACKOFF_S", 0.1)
    world.promote(bad := world.register(broken=True))
    world.settle(world.follower())
    assert world.running() == [0]
    assert world.champion() is None
    assert (history(world.uri, DRAFT)[-1].version, history(world.uri, DRAFT)[-1].outcome) == (bad, "rolled back")


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_server_whose_counters_cannot_be_read_is_left_alone(
    world: ServingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.promote(world.register(2.5))
    follower = world.follower(unhealthy_s=0.1)
    world.settle(follower)
    served = [process.pid for process in world.servers()]
    with monkeypatch.context() as patch:
        patch.setattr("infra.drift.scrape.text_string_to_metric_families", lambda _: iter(()))
        for _ in range(20):
            follower.round()
    assert [process.pid for process in world.servers()] == served
    assert sum("shows no metrics of SGLang" in line for line in world.said) == 1
    world.settle(follower)


def test_a_rollback_needs_no_trial(world: ServingWorld) -> None:
    follower = world.follower()
    first, second = world.register(2.0), world.register(2.5)
    for version in (first, second):
        world.promote(version)
        world.settle(follower)
    DraftInService(world.uri, DRAFT).rollback(by="ada", reason="users complain")
    before = len(world.said)
    world.settle(follower)
    assert world.running() == [first] * 3
    assert not any("answers as expected" in line for line in world.said[before:])
    DraftInService(world.uri, DRAFT).rollback(by="ada", reason="no draft at all")
    world.settle(follower)
    assert world.running() == [0] * 3


def test_other_weights_than_the_registered_ones_are_never_served(world: ServingWorld) -> None:
    follower = world.follower()
    good, bad = world.register(2.0), world.register(2.5)
    world.promote(good)
    world.settle(follower)
    (weights,) = (
        path for path in world.folder.glob("mlflow-artifacts/**/model.safetensors") if "weights 1" in path.read_text()
    )
    weights.write_text("something else")
    world.promote(bad)
    world.settle(follower)
    assert world.running() == [good] * 3
    assert "SHA-256" in history(world.uri, DRAFT)[-1].reason
    assert not (world.folder / "served" / DRAFT / str(bad)).exists()


def test_without_the_registry_dead_servers_return(world: ServingWorld) -> None:
    follower = world.follower()
    world.promote(version := world.register())
    world.settle(follower)
    database = world.folder / "mlflow.db"
    database.rename(world.folder / "away.db")
    database.write_text("not a database")
    for process in world.servers():
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    again = world.follower()
    world.settle(again, rounds=20)
    deadline = time.monotonic() + 30
    while world.running() != [version] * 3 and time.monotonic() < deadline:
        again.round()
    assert world.running() == [version] * 3
    assert any("stay as they are" in line for line in world.said)


def test_a_trial_goes_on_while_the_registry_is_away(world: ServingWorld) -> None:
    """The follower is started again in the middle of it, and the registry answers no more."""
    good, new = world.register(2.5), world.register(2.6)
    world.promote(good)
    world.settle(world.follower())
    world.promote(new)
    follower = world.follower(canary=CanaryConfig(steps=10**6, wait_s=600.0))
    while not (follower.state.trial and follower.state.trial.probed):
        follower.round()
    (world.folder / "mlflow.db").rename(world.folder / "away.db")
    (world.folder / "mlflow.db").write_text("not a database")
    again = world.follower()
    deadline = time.monotonic() + 60
    while world.running() != [new] * 3 and time.monotonic() < deadline:
        again.round()
    assert world.running() == [new] * 3
    assert any("served unchecked" in line for line in world.said)


def test_a_name_that_the_registry_does_not_know_withdraws_nothing(world: ServingWorld) -> None:
    world.promote(version := world.register())
    world.settle(world.follower())
    follower = world.follower(draft="draft-misspelt")
    assert [follower.round() for _ in range(3)] == [False] * 3, "nothing was rolled out"
    assert world.running() == [version] * 3
    assert any("no draft draft-misspelt is registered" in line for line in world.said)
    world.settle(world.follower())
    assert world.running() == [version] * 3


def test_what_a_killed_server_leaves_does_not_stop_its_return(world: ServingWorld) -> None:
    """SGLang's processes inherit the mark, and may outlive the one that was started."""
    world.promote(version := world.register())
    follower = world.follower()
    world.settle(follower)
    mark = world.servers()[0].environ()[MARK]
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, MARK: mark})
    for process in world.servers():
        if process.pid != left.pid and process.environ()[MARK] == mark:
            process.kill()
            process.wait(10)
    world.settle(follower)
    assert world.running() == [version] * 3
    assert left.wait(10) == -signal.SIGKILL


def test_a_damaged_folder_is_fetched_again(world: ServingWorld) -> None:
    world.promote(version := world.register())
    world.settle(world.follower())
    weights = world.folder / "served" / DRAFT / str(version) / "model.safetensors"
    weights.write_text("damaged")
    world.settle(world.follower())
    assert weights.read_text() == "weights 0"


@pytest.mark.parametrize("world", [1], indirect=True)
def test_one_server_alone_is_compared_with_itself(world: ServingWorld) -> None:
    follower = world.follower()
    good, bad = world.register(2.5), world.register(1.75)
    world.promote(good)
    world.settle(follower)
    world.promote(bad)
    world.settle(follower)
    assert world.running() == [good]
    assert "of the version before it" in history(world.uri, DRAFT)[-1].reason


@pytest.mark.parametrize("world", [1], indirect=True)
def test_servers_of_another_supervisor_are_restarted_by_its_command(world: ServingWorld) -> None:
    """A shell script in place of systemd: it ends the old process and starts a new one with the file's arguments."""
    (port,) = world.ports
    unit, pid = world.folder / "restart.sh", world.folder / "pid"
    environment = world.folder / "served" / "servers" / f"127.0.0.1-{port}.env"
    unit.write_text(
        f"if [ -f {pid} ]; then kill -9 $(cat {pid}); sleep 0.2; fi\n"
        f"DRAFT_ARGUMENTS=$(sed s/^DRAFT_ARGUMENTS=// {environment})\n"
        f"{STAND_IN} --port {port} --enable-metrics $DRAFT_ARGUMENTS & echo $! > {pid}\n"
    )
    server = ServerConfig(url=f"http://127.0.0.1:{port}", restart=f"bash {unit}")
    follower = world.follower(servers=(server,), unhealthy_s=0.3)
    try:
        for length in (2.0, 2.5):
            world.promote(version := world.register(length))
            world.settle(follower)
            assert world.running() == [version]
        follower.stop_servers()
        assert world.running() == [version], "they are somebody else's"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_port_that_another_program_has_is_refused(world: ServingWorld) -> None:
    world.promote(world.register())
    world.settle(world.follower())
    other = world.folder / "other"
    with pytest.raises(Refusal, match="did not start"):
        world.follower(folder=str(other))


def test_a_version_that_its_benchmark_advises_against_is_not_loaded(world: ServingWorld) -> None:
    follower = world.follower()
    version = world.register()
    settings = next(world.folder.glob("mlflow-artifacts/**/sglang.json"))
    settings.write_text(json.dumps({"arguments": []}))
    world.promote(version)
    world.settle(follower)
    assert world.running() == [0] * 3
    assert world.champion() == version


def test_a_version_is_rolled_out_after_one_that_is_served_without_a_draft(world: ServingWorld) -> None:
    follower = world.follower()
    alone = world.register()
    settings = next(world.folder.glob("mlflow-artifacts/**/sglang.json"))
    settings.write_text(json.dumps({"arguments": []}))
    world.promote(alone)
    world.settle(follower)
    world.promote(version := world.register())
    world.settle(follower)
    assert world.running() == [version] * 3


def test_a_follower_that_may_not_withdraw_hears_of_what_is_promoted_next(world: ServingWorld) -> None:
    def forbidden(version: int, reason: str) -> None:
        raise MlflowException(f"PERMISSION_DENIED: version {version}")

    follower = Follower(world.config(), world.uri, forbidden, world.said.append)
    world.promote(world.register())
    world.settle(follower)
    world.promote(bad := world.register(length=1.2, promised=2.5))
    while bad not in follower.state.taken_back:
        follower.round()
    assert world.champion() == bad, "the registry was not told"
    world.promote(better := world.register())
    world.settle(follower)
    assert world.running() == [better] * 3
    assert f"the registry does not withdraw version {bad}: PERMISSION_DENIED: version {bad}" in world.said
    connect(world.uri).delete_model_version(DRAFT, str(bad))
    world.settle(follower)
    assert not follower.state.taken_back, "what the registry does not know any more cannot be withdrawn"


def test_a_version_without_arguments_is_not_served_and_not_withdrawn(world: ServingWorld) -> None:
    """What is missing is a setting of the follower; the version may serve well elsewhere."""
    good = world.register()
    world.promote(good)
    world.settle(world.follower())
    version = world.register()
    for settings in world.folder.glob("mlflow-artifacts/**/sglang.json"):
        settings.unlink()
    world.promote(version)
    follower = world.follower()
    for _ in range(3):
        follower.round()
    assert world.running() == [good] * 3
    assert world.champion() == version
    assert any("set `arguments`" in line for line in world.said)
    world.settle(world.follower(arguments=ARGUMENTS))
    assert world.running() == [version] * 3


def test_changed_settings_reach_the_servers_one_by_one(world: ServingWorld) -> None:
    world.promote(version := world.register())
    world.settle(world.follower())
    before, said = {process.pid for process in world.servers()}, len(world.said)
    world.settle(world.follower())
    assert {process.pid for process in world.servers()} == before
    with Clients(world.ports) as clients:
        world.settle(world.follower(arguments=("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2")))
    assert not before & {process.pid for process in world.servers()}
    assert world.running() == [version] * 3
    assert sum("is replaced" in line for line in world.said[said:]) == 3
    assert clients.lost == []
    assert clients.least_healthy >= 2


def test_servers_can_be_stopped(world: ServingWorld) -> None:
    world.promote(world.register())
    world.settle(follower := world.follower())
    follower.stop_servers()
    assert world.running() == [None] * 3
    assert world.servers() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"min_healthy": 3}, "no version could ever be replaced"),
        ({"servers": [{"url": "http://a:1", "command": "x"}] * 2, "min_healthy": 0}, "there twice"),
        ({"servers": [{"url": "http://a:1"}]}, "either `command` or `restart`"),
        ({"servers": [{"url": "a:1", "command": "x"}]}, "no address of a server"),
        ({"servers": [{"url": "http://a:1", "command": 'x "'}]}, "cannot be read"),
        ({"servers": [{"url": "http://a:1", "command": "x --speculative-draft-model-path y"}]}, "leave"),
        ({"servers": [{"url": "http://u:p@a:1", "command": "x"}]}, "password"),
    ],
)
def test_settings_that_cannot_work_are_refused(content: dict[str, object], message: str) -> None:
    servers = [{"url": f"http://a:{port}", "command": "x"} for port in range(1, 4)]
    with pytest.raises(ValueError, match=message):
        FollowConfig.model_validate({"draft": "d", "folder": "/f", "servers": servers} | content)
