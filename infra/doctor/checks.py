"""The checks of `draftsmith doctor`: a table of name, probe and remedy, in the order in which a person would ask."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pynvml

from infra import settings
from infra.doctor import cuda, devices, machine, network, software
from infra.doctor.finding import Finding, judge
from infra.pools.gpus import read_gpus
from infra.transport.mooncake.environment import INSTALL

Probe = Callable[[], Finding | list[Finding]]


class Check(NamedTuple):
    """One row: what is checked, by what, and what to do unless all is well."""

    name: str
    probe: Probe
    remedy: str


def checks() -> tuple[Check, ...]:
    """All checks of this machine; nothing is probed yet."""
    gpus, versions = cache(read_gpus), cache(software.installed)
    shared, runs, cached = settings.shared_memory_folder(), settings.runs_folder(), settings.cache_folder()
    rebuild = "`make clean`, then `make quickstart`: it chooses the build of torch by the driver"
    larger_disk = "free some, or set {} to a larger disk of yours: the quickstart needs 1 GiB, larger targets over 10"
    return tuple(Check(*row) for row in (
        ("Python", machine.python, "make the environment anew with Python 3.11, 3.12 or 3.13"),
        ("packages", lambda: software.requirements(versions(), software.declared()),
         "pip install --editable '.[quickstart]' in the project's folder"),
        ("versions", lambda: software.clashes(versions()), "install versions that go together"),
        ("processor", machine.processor, "run `make test` first, or take a machine with a processor of Intel or AMD"),
        ("cores", machine.cores, "give the container a whole core at least (`--cpus`, resources.limits.cpu)"),
        ("memory", machine.memory, "close what you do not need: the quickstart needs 2 GiB, 4 are comfortable"),
        ("open files", machine.open_files, "`ulimit -n 1024`, or as many as the hard limit allows"),
        ("processes", machine.processes, "`ulimit -u 1024`, or as many as the hard limit allows"),
        ("shared memory", lambda: machine.shared_memory(shared),
         "runs then keep their objects in the run folder, which is slower: give a container more (`--shm-size=2g`), "
         "delete what fills it, set DRAFTSMITH_SHM to a tmpfs of yours, or lower transport.budget_mib"),
        ("run folders in memory", lambda: machine.leftovers(shared), "nothing to do: the next run removes them"),
        ("run folder", lambda: machine.run_folder(runs), larger_disk.format("DRAFTSMITH_RUNS")),
        ("file locks", lambda: machine.file_locks(runs, cached, Path(tempfile.gettempdir())),
         "set DRAFTSMITH_RUNS, DRAFTSMITH_CACHE or TMPDIR to a local disk; synchronise the clocks (chrony, NTP)"),
        ("cache folder", lambda: machine.disk(cached), larger_disk.format("DRAFTSMITH_CACHE")),
        ("GPUs", lambda: devices.gpus(gpus()),
         "runs lease idle GPUs: install NVIDIA's driver, stop its processes (they may run outside this container) "
         "or allow them their memory (DRAFTSMITH_GPU_IGNORED_MIB), or switch MIG off (`nvidia-smi -mig 0`)"),
        ("torch build", lambda: cuda.torch_build(versions().get("torch"), gpus(), cuda.version_file()),
         f"{rebuild}, or update the driver"),
        ("compute capability", lambda: cuda.capabilities(gpus(), cuda.version_file()), rebuild),
        ("torch on GPUs", lambda: cuda.torch_works(gpus()),
         f"{rebuild}; where the driver was updated just now, restart the machine"),
        ("C compiler", lambda: cuda.kernel_builds(gpus()),
         "on GPUs training compiles its kernels in the first step (Debian: apt install gcc python3-dev, or the -dev "
         "package of the Python in use)"),
        ("RDMA", devices.rdma, "no port is active: check cable, switch and subnet manager"),
        ("RDMA access", devices.rdma_access,
         "pass them into the container (`--device=/dev/infiniband`), load ib_uverbs, or let this user open them"),
        ("locked memory", devices.locked_memory,
         "`ulimit -l unlimited` (limits.conf: memlock; systemd: LimitMEMLOCK; Docker: --ulimit memlock=-1)"),
        ("GPUDirect", devices.gpudirect, "`modprobe nvidia-peermem` lets samples arrive in the GPU's own memory"),
        ("engine transformers", lambda: software.version_of("transformers", versions()),
         "pip install 'transformers>=5.23,<6'"),
        ("engine SGLang", lambda: software.sglang(settings.sglang_environment()),
         "`make sglang` makes it, with Draftsmith's capture plugin ($DRAFTSMITH_SGLANG names another place); none "
         "needed with generator.engine=transformers"),
        ("SGLang on GPUs", lambda: cuda.sglang_environment(settings.sglang_environment(), gpus()),
         "SGLang compiles kernels as it runs: driver 580 or newer, g++, and CUDA's compiler 13, which `make sglang` "
         "sets up. None needed with generator.engine=transformers"),
        ("Mooncake", software.mooncake,
         f"none needed on one machine; between several: {INSTALL}, and the system's libraries"),
        ("Prefect server", lambda: network.prefect(settings.prefect_api_url()),
         "start it (`draftsmith ui` starts one here), or unset PREFECT_API_URL: runs then start their own"),
        ("MLflow", lambda: network.mlflow(settings.tracking_uri()),
         "unset MLFLOW_TRACKING_URI (runs are then kept in a SQLite file), or set it to sqlite:////absolute/path.db or "
         "to the address of a server that runs"),
        ("MLflow registry", lambda: network.mlflow_registry(settings.registry_uri(), settings.tracking_uri()),
         "one server keeps runs and versions: look for drafts there, and unset the variable"),
        ("Hugging Face Hub", network.hub, "unset HF_HUB_OFFLINE to download a target; the quickstart needs none"),
    ))  # fmt: skip


def examine() -> list[Finding]:
    """What this machine has and lacks, each finding with its remedy."""
    return [finding for check in checks() for finding in run_check(check)]


def run_check(check: Check) -> list[Finding]:
    """The check's findings; one that fails to run is reported and does not stop the others."""
    try:
        answer = check.probe()
    except (OSError, ValueError, KeyError, pynvml.NVMLError) as error:
        answer = judge(f"could not be checked: {error}", note=True, remedy="look yourself; the other checks were made")
    findings = answer if isinstance(answer, list) else [answer]
    return [one.named(check.name, check.remedy) for one in findings]
