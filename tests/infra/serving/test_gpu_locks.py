"""The GPUs of servers stay locked while the servers are replaced, and a lease of a run is respected."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from pydantic import ValidationError

from infra.files.locks import LockHeldError, hold
from infra.serving.config import ServerConfig
from infra.serving.gpu_locks import ServerGpus
from tests.infra.serving.serving_world import ServingWorld, serving_world
from tests.infra.serving.test_operated_servers import rounds_until

URL = "http://127.0.0.1:30000"
GPUS = ("GPU-aa", "GPU-bb", "GPU-cc")


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's locks, where followers look for them; its GPUs are known to a stand-in for NVIDIA's library."""
    answers = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: len(GPUS),
        "DeviceGetHandleByIndex": GPUS.__getitem__,
        "DeviceGetUUID": str,
        "DeviceGetMigMode": lambda _gpu: (0, 0),
        "DeviceGetMemoryInfo": lambda _gpu, **_version: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    monkeypatch.setattr("infra.serving.gpu_locks.LOCKS", tmp_path / "locks")
    return tmp_path / "locks"


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str, request: pytest.FixtureRequest) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, getattr(request, "param", 1)) as world:
        yield world


def server(*gpus: int | str) -> ServerConfig:
    return ServerConfig(url=URL, command="sglang", gpus=gpus)


def unknown(name: int | str) -> str:
    return (
        f"{URL}: no GPU that this process sees answers to {name}, so none is kept from runs: correct `gpus`, or see "
        "nvidia-smi"
    )


def is_locked(locks: Path, gpu: str) -> bool:
    try:
        with hold(locks / f"{gpu}.lock"):
            return False
    except LockHeldError:
        return True


@pytest.mark.parametrize(
    ("names", "locked"),
    [((0,), {"GPU-aa"}), ((1, "GPU-c"), {"GPU-bb", "GPU-cc"}), ((3,), set()), (("GPU-aa", "GPU-0"), {"GPU-aa"})],
)
def test_the_gpus_that_servers_name_are_locked(locks: Path, names: tuple[int | str, ...], locked: set[str]) -> None:
    said: list[str] = []
    gpus = ServerGpus([server(*names)], said.append)
    gpus.take()
    gpus.take()
    assert {gpu for gpu in GPUS if is_locked(locks, gpu)} == locked
    assert said == ([] if len(locked) == len(names) else [unknown(names[-1])])
    assert gpus.can_start(URL)


def test_a_gpu_that_is_hidden_from_the_follower_is_said_not_to_be_locked(
    locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(index: int) -> str:
        if index == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return GPUS[index]

    said: list[str] = []
    gpus = ServerGpus([server(0, "GPU-cc")], said.append)
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", hidden)
        gpus.take()
    assert said == [unknown("GPU-cc")]
    gpus.take()
    assert is_locked(locks, "GPU-cc"), "it is tried again"


def test_servers_that_name_no_gpu_and_machines_without_a_driver_lock_nothing(
    locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    ServerGpus([server()], print).take()
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    gpus = ServerGpus([server(0)], print)
    gpus.take()
    assert gpus.can_start(URL)
    assert not locks.exists()


def test_locks_that_cannot_be_taken_stop_no_server(locks: Path) -> None:
    locks.symlink_to(locks.parent)
    said: list[str] = []
    gpus = ServerGpus([server(0)], said.append)
    gpus.take()
    gpus.take()
    assert gpus.can_start(URL)
    assert ["the lock of GPU-aa cannot be taken" in line for line in said] == [True]


def test_gpus_are_named_by_position_or_uuid() -> None:
    assert ServerConfig.model_validate({"url": URL, "command": "x", "gpus": [0, "GPU-1a2b"]}).gpus == (0, "GPU-1a2b")
    for name in ("0,1", " GPU-aa", "all", -1):
        with pytest.raises(ValidationError):
            server(name)


RUN = """
import sys
from pathlib import Path
from infra.pools.base import PoolSpec
from infra.pools.local import LocalPools
from infra.processes.process import Owner
folder = Path(sys.argv[1])
pools = LocalPools(("GPU-aa",), folder / "locks")
pools.acquire([PoolSpec("training", 1)], Owner("run", folder))
print("leased", flush=True)
sys.stdin.read()
"""


def test_a_server_waits_for_the_run_that_leased_its_gpu(world: ServingWorld, locks: Path) -> None:
    """And one that runs beside it serves on and is not replaced meanwhile."""
    world.promote(version := world.register(2.0))
    alone = world.config().servers
    named = tuple(one.model_copy(update={"gpus": (0,)}) for one in alone)
    command = [sys.executable, "-c", RUN, str(locks.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "leased\n"
        waiting = world.follower(servers=named)
        for _ in range(5):
            waiting.round()
        assert world.servers() == []
        assert sum("a run or another follower holds GPU-aa" in line for line in world.said) == 1
        world.settle(world.follower(servers=alone))  # before its file named the GPU
        served = {process.pid for process in world.servers()}
        for _ in range(5):
            waiting.round()
        assert world.running() == [version]
        assert {process.pid for process in world.servers()} == served
        run.kill()
    world.settle(waiting)
    assert world.running() == [version]
    assert served.isdisjoint(process.pid for process in world.servers())
    assert is_locked(locks, "GPU-aa")


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_server_whose_gpu_is_leased_is_sent_no_weights_and_keeps_no_other_waiting(
    world: ServingWorld, locks: Path
) -> None:
    world.swaps = True
    first, second = (world.register(length, in_weights=True, frozen=True) for length in (2.0, 2.5))
    leased, other = (
        one.model_copy(update={"gpus": (position,)}) for position, one in enumerate(world.config().servers)
    )
    world.promote(first)
    world.settle(follower := world.follower(servers=(leased, world.config().servers[1])))
    served = {process.pid for process in world.servers()}
    follower._fleet.gpus._held.close()  # as when it ends
    world.promote(second)
    with hold(locks / "GPU-aa.lock"):
        follower = world.follower(servers=(leased, other))
        assert is_locked(locks, "GPU-bb"), "before it asks the registry"
        rounds_until(follower, lambda: f"{other.url} is healthy with version {first}" in world.said[-1:])
        for _ in range(3):
            assert not follower.round()
    assert world.running() == [first, first]
    assert len(served & {process.pid for process in world.servers()}) == 1
    assert not [line for line in world.said if "update_weights" in line or f"{leased.url} is replaced" in line]


def test_the_gpu_of_a_server_that_is_away_stays_locked(world: ServingWorld, locks: Path) -> None:
    """The follower holds it, not the server: the lock ends with the follower."""
    world.promote(version := world.register(2.0))
    named = tuple(one.model_copy(update={"gpus": ("GPU-bb",)}) for one in world.config().servers)
    follower = world.follower(servers=named)
    world.settle(follower)
    (process,) = world.servers()
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == "1"
    assert not [file.path for file in process.open_files() if file.path.endswith(".lock")]
    process.kill()
    process.wait(60)
    assert is_locked(locks, "GPU-bb")
    world.settle(follower)
    assert world.running() == [version]
