"""Whoever may write to MLflow chooses a version's arguments: none reaches a server that no export writes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.refusal import Refusal
from infra.serving.config import ServerConfig
from infra.serving.control import RestartedServer
from infra.serving.versions import BrokenVersionError, open_version
from infra.tracking.registry import history
from tests.infra.serving.serving_world import DRAFT, ServingWorld, serving_world

ALGORITHM = ["--speculative-algorithm", "EAGLE3"]


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, 1) as world:
        yield world


def version_with(folder: Path, settings: object) -> Path:
    (folder / "7" / "serving").mkdir(parents=True)
    (folder / "7" / "serving" / "sglang.json").write_text(json.dumps(settings))
    return folder / "7"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*ALGORITHM, "--trust-remote-code", "--model-path", "/evil"], "'--trust-remote-code'"),
        (["--speculative-algorithm", "EAGLE3\nLD_PRELOAD=/evil.so"], "'--speculative-algorithm'"),
        (["--speculative-algorithm", "EAGLE3 --host 0.0.0.0"], "'--speculative-algorithm'"),
        (["--speculative-algorithm", "--trust-remote-code"], "'--speculative-algorithm'"),
        (["--speculative-draft-attention-backend", "/evil"], "'--speculative-draft-attention-backend'"),
        (["--speculative-algorithm=EAGLE3"], "'--speculative-algorithm=EAGLE3'"),
        (["--speculative-num-steps", 3], "'--speculative-num-steps'"),
        (["--speculative-num-steps"], "'--speculative-num-steps'"),
        ([["--trust-remote-code"]], "--trust-remote-code"),
        ([*ALGORITHM, "--trust-remote-code\n"], r"'--trust-remote-code\\n'"),
    ],
)
def test_a_version_with_arguments_that_no_export_writes_is_broken(
    arguments: object, named: str, tmp_path: Path
) -> None:
    place = version_with(tmp_path, {"arguments": arguments, "adaptive_arguments": arguments})
    for adaptive in (False, True):
        with pytest.raises(BrokenVersionError, match=f"version 7 .*{named}"):
            open_version(place, None, adaptive)
    assert open_version(place, ALGORITHM, False).arguments[2:] == tuple(ALGORITHM), "the settings' own hold"


@pytest.mark.parametrize(
    "settings", [[], "arguments", {"arguments": "--a"}, {"arguments": None}, {"arguments": {"--a": "b"}}, 3]
)
def test_settings_of_another_form_are_refused(settings: object, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="version 7 says no arguments"):
        open_version(version_with(tmp_path, settings), None, False)


@pytest.mark.parametrize("adaptive", [3, "--trust-remote-code", {"--a": "b"}])
def test_arguments_for_a_changing_load_are_checked_where_they_are_used(adaptive: object, tmp_path: Path) -> None:
    place = version_with(tmp_path, {"arguments": ALGORITHM, "adaptive_arguments": adaptive})
    assert open_version(place, None, False).arguments[2:] == tuple(ALGORITHM)
    with pytest.raises(BrokenVersionError, match="version 7 asks for the argument"):
        open_version(place, None, True)


def test_such_a_version_goes_back_and_servers_keep_theirs(world: ServingWorld) -> None:
    follower = world.follower()
    world.promote(good := world.register())
    world.settle(follower)
    served = [process.pid for process in world.servers()]
    known = set(world.folder.glob("mlflow-artifacts/**/sglang.json"))
    bad = world.register()
    (settings,) = set(world.folder.glob("mlflow-artifacts/**/sglang.json")) - known
    settings.write_text(json.dumps({"arguments": ["--speculative-num-steps", 3, "--trust-remote-code"]}))
    world.promote(bad)
    world.settle(follower)
    assert world.champion() == good
    assert [process.pid for process in world.servers()] == served
    assert f"version {bad}" in history(world.uri, DRAFT)[-1].reason
    assert "'--speculative-num-steps'" in history(world.uri, DRAFT)[-1].reason


@pytest.mark.parametrize("argument", ["EAGLE3\nLD_PRELOAD=/evil.so", "EAGLE3\rA=b", "two words", "EAGLE3\u2028A=b"])
def test_no_argument_adds_a_line_to_the_file_of_variables(argument: str, tmp_path: Path) -> None:
    control = RestartedServer(ServerConfig(url="http://127.0.0.1:1", restart="false"), tmp_path)
    with pytest.raises(Refusal, match=r"127\.0\.0\.1-1\.env: "):
        control.start(["--speculative-algorithm", argument])
    assert not (tmp_path / "servers").exists()
