"""The places that the contract of pools is tested in: this machine, a Ray cluster, a Slurm cluster; real ones."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from infra.config import PoolsConfig
from infra.pools.base import Pool, PoolBusyError, PoolProvider, PoolSpec
from infra.pools.local import LocalPools
from infra.pools.queued import Engine, QueuedPools
from infra.pools.ray_pools import RayEngine
from infra.processes import Owner, start

MACHINES, GPUS = 2, 4
"""Of each cluster here."""
CLUSTER_S = 120.0
ADMITTED_S = 90.0
LOOK_S = 8.0
"""Less than the flow has: to be refused takes that long."""


@dataclass(frozen=True)
class Place:
    """Where pools come from, as this process and others get at it."""

    kind: str
    machines: int
    provider: Callable[[], PoolProvider]
    """Makes a new one."""
    code: str
    """Lines of Python that do the same in another process; they leave it as `provider`."""

    def acquire(self, provider: PoolProvider, specs: list[PoolSpec], owner: Owner) -> Sequence[Pool]:
        """Wait for the engine to admit."""
        deadline = time.monotonic() + ADMITTED_S
        while True:
            with suppress(PoolBusyError):
                return provider.acquire(specs, owner)
            assert time.monotonic() < deadline, "never admitted"
            time.sleep(0.2)


LOCAL = """
from pathlib import Path
from infra.pools.local import LocalPools
provider = LocalPools({gpus!r}, Path({locks!r}))
"""
QUEUED = """
from infra.config import PoolsConfig
from infra.pools.choice import pool_provider
provider = pool_provider(PoolsConfig.model_validate_json({config!r}))
"""

CLUSTER = """
import sys, time
from ray.cluster_utils import Cluster
machines, gpus = int(sys.argv[1]), int(sys.argv[2])
small = {"object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
for _ in range(machines):
    cluster.add_node(num_cpus=16, num_gpus=gpus, **small)
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
time.sleep(7200)
"""


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray cluster on loopback: a head without devices, and machines with GPUs that are only counted."""
    if find_spec("ray") is None:
        pytest.skip("needs pip install draftsmith[ray]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else Ray looks for 127.0.0.1 on the network
        command = [sys.executable, "-c", CLUSTER, str(MACHINES), str(GPUS)]
        cluster = start("ray", command, Owner("tests", tmp_path_factory.mktemp("ray")))
        lines: list[str] = []
        deadline = time.monotonic() + CLUSTER_S
        while not any(line.startswith("address ") for line in lines):
            cluster.check()
            lines += cluster.new_lines()
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)
        yield next(line for line in lines if line.startswith("address ")).split()[1]
        cluster.stop()


@pytest.fixture(params=["local", "ray"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Every provider in turn."""
    if request.param != "local":
        return request.getfixturevalue(f"{request.param}_place")
    gpus, locks = tuple(f"GPU-{number}" for number in range(GPUS)), tmp_path / "locks"
    return Place("local", 1, lambda: LocalPools(gpus, locks), LOCAL.format(gpus=gpus, locks=str(locks)))


@pytest.fixture
def ray_place(ray_address: str) -> Place:
    """A Ray cluster."""
    settings = {"kind": "ray", "ray": {"address": ray_address}, "cores_per_gpu": 1, "cores": 2}
    config = PoolsConfig.model_validate(settings)
    return queued_place(config, RayEngine(config.ray))


def queued_place(config: PoolsConfig, engine: Engine) -> Place:
    code = QUEUED.format(config=config.model_dump_json())
    return Place(config.kind, MACHINES, lambda: QueuedPools(engine, config, LOOK_S), code)


Wait = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def wait_until() -> Wait:
    """Waits for something that must come about within 90 s."""

    def wait(there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 90
        while not there():
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    return wait


@pytest.fixture
def running() -> Callable[[str], list[psutil.Process]]:
    """Processes of this machine that were given an argument."""

    def find(argument: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if argument in process.cmdline():
                    found.append(process)
        return found

    return find
