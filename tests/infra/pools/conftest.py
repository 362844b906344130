"""The places that the contract of pools is tested in: this machine, a Ray cluster, a Slurm cluster; real ones."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from infra.config import PoolsConfig
from infra.network.ports import lasting_ports
from infra.pools.base import Pool, PoolBusyError, PoolProvider, PoolSpec
from infra.pools.local import LocalPools
from infra.pools.queued import QueuedPools
from infra.processes.process import Owner, Process, start

MACHINES, GPUS = 2, 4
"""Of each cluster here."""
CLUSTER_S = 300.0
ADMITTED_S = 240.0
LOOK_S = 4.0
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
from infra.pools.run_pools import pool_provider
provider = pool_provider(PoolsConfig.model_validate_json({config!r}))
"""

CLUSTER = """
import sys, time
from ray.cluster_utils import Cluster
machines, gpus = int(sys.argv[1]), int(sys.argv[2])
# Ray itself would wait 30 s for each of them.
small = {"object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1", "wait": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
cluster.wait_for_nodes(240)
for _ in range(machines):
    cluster.add_node(num_cpus=16, num_gpus=gpus, **small)
    cluster.wait_for_nodes(240)
print("address", cluster.address, flush=True)
time.sleep(7200)
"""


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray cluster that nobody damages."""
    with ray_cluster(tmp_path_factory.mktemp("ray"), MACHINES) as address:
        yield address


@contextmanager
def ray_cluster(folder: Path, machines: int) -> Iterator[str]:
    """A Ray cluster on loopback: a head without devices, and machines with GPUs that are only counted."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else they starve beside other tests
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else Ray looks for 127.0.0.1 on the network
        command = [sys.executable, "-c", CLUSTER, str(machines), str(GPUS)]
        cluster = start("ray", command, Owner("tests", folder))
        lines: list[str] = []
        deadline = time.monotonic() + CLUSTER_S
        while not any(line.startswith("address ") for line in lines):
            cluster.check()
            lines += cluster.new_lines()
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)
        yield next(line for line in lines if line.startswith("address ")).split()[1]
        cluster.stop()


@pytest.fixture
def breakable_ray(tmp_path: Path, without_twins: None) -> Iterator[str]:
    """A Ray cluster of a test's own, with a machine to spare. Its processes may be suspended."""
    with ray_cluster(tmp_path / "ray", MACHINES + 1) as address:
        yield address


@pytest.fixture(params=["local", "ray", "slurm"])
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
    return queued_place(PoolsConfig.model_validate(settings))


def queued_place(config: PoolsConfig) -> Place:
    code = QUEUED.format(config=config.model_dump_json())
    return Place(config.kind, MACHINES, lambda: QueuedPools(config, LOOK_S), code)


@pytest.fixture
def slurm_place(slurm_cluster: None) -> Place:
    """A Slurm cluster."""
    return queued_place(PoolsConfig(kind="slurm", cores_per_gpu=1, cores=2))


SLURM = """
ClusterName=draftsmith-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
GresTypes=gpu
KillWait=5
MessageTimeout=60
BatchStartTimeout=120
UnkillableStepTimeout=300
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SLURM_NODE = "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 Gres=gpu:{gpus}\n"
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def configure_slurm(folder: Path) -> None:
    """A cluster of several slurmd on this machine, whose GPUs are device files that nobody opens."""
    host = socket.gethostname().partition(".")[0]
    port, *ports = lasting_ports(1 + MACHINES)  # it binds them seconds later
    conf = SLURM.format(host=host, port=port, folder=folder)
    gres = ""
    for number in range(1, MACHINES + 1):
        conf += SLURM_NODE.format(number=number, host=host, port=ports[number - 1], gpus=GPUS)
        for gpu in range(GPUS):
            os.mknod(folder / f"gpu{number}{gpu}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        gres += f"NodeName=n{number} Name=gpu File={folder}/gpu{number}[0-{GPUS - 1}]\n"
        (folder / f"n{number}").mkdir()
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(gres)
    (folder / "state").mkdir()
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """With a name that is short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[None]:
    """A Slurm cluster on loopback; what this process and its children start finds it."""
    missing = [name for name in SLURM_PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid():
        pytest.skip("needs root, and Debian's slurmctld, slurmd, slurm-client and munge")
    with pytest.MonkeyPatch.context() as patch, memory_folder() as folder, ExitStack() as stack:
        configure_slurm(folder)
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        own = [f"--{name}={folder / 'munge'}{end}" for name, end in MUNGE_FILES.items()]
        commands = {"munged": ["munged", "--foreground", "--force", f"--key-file={folder / 'key'}", *own]}
        commands["slurmctld"] = ["slurmctld", "-D"]
        commands |= {f"n{number}": ["slurmd", "-D", "-N", f"n{number}"] for number in range(1, MACHINES + 1)}
        owner = Owner("tests", folder / "logs")
        for role, command in commands.items():
            process = start(role, command, owner, grace_s=2.0)
            stack.callback(process.stop)
            if role == "munged":
                wait_for((folder / "munge").exists, process)
        wait_for(lambda: _idle() == MACHINES, process)
        yield


MUNGE_FILES = {"socket": "", "pid-file": ".pid", "log-file": ".log", "seed-file": ".seed"}


def _idle() -> int:
    command = ["sinfo", "-N", "-h", "-o", "%t"]  # waits for slurmctld
    shown = subprocess.run(command, capture_output=True, text=True, timeout=CLUSTER_S, check=False)
    return shown.stdout.split().count("idle")


def wait_for(there: Callable[[], bool], process: Process) -> None:
    deadline = time.monotonic() + CLUSTER_S
    while not there():
        process.check()
        assert time.monotonic() < deadline, process.log.read_text()
        time.sleep(0.1)


Wait = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def wait_until() -> Wait:
    """Waits for something that must come about within four minutes."""

    def wait(there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 240
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
