"""Runs all checks of `draftsmith doctor`; a check that fails to run is reported and does not stop the others."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pynvml

from infra import settings
from infra.doctor import devices, folders, machine, network, software
from infra.doctor.finding import Finding, note
from infra.pools.gpus import Gpus, read_gpus

Check = Callable[[], list[Finding]]


def examine() -> list[Finding]:
    """What this machine has and lacks, in the order in which a person would ask."""
    shared = settings.shared_memory_folder()
    gpus, versions = cache(read_gpus), cache(software.installed)
    checks: tuple[tuple[str, Check], ...] = (
        ("Python", machine.check_python),
        ("packages", lambda: software.check_requirements(versions(), software.declared())),
        ("versions", lambda: software.check_clashes(versions())),
        ("cores", machine.check_cores),
        ("memory", machine.check_memory),
        ("open files", machine.check_open_files),
        ("shared memory", lambda: folders.check_shared_memory(shared)),
        ("run folders in memory", lambda: folders.check_leftovers(shared)),
        ("run folder", lambda: folders.check_runs_folder(settings.runs_folder())),
        ("cache folder", lambda: folders.check_cache_folder(settings.cache_folder())),
        ("GPUs", lambda: devices.check_gpus(gpus())),
        ("torch build", lambda: _check_torch(versions().get("torch"), gpus())),
        ("RDMA", devices.check_rdma),
        ("engines", lambda: software.check_engines(versions(), settings.sglang_environment())),
        ("Prefect server", lambda: network.check_prefect(settings.prefect_api_url())),
        ("MLflow", lambda: network.check_mlflow(settings.tracking_uri())),
        ("proxies", network.check_proxies),
        ("Hugging Face Hub", network.check_hub),
    )
    return [finding for name, check in checks for finding in made(name, check)]


def made(name: str, check: Check) -> list[Finding]:
    """The check's findings, or a note that it could not be made."""
    try:
        return check()
    except (OSError, ValueError, KeyError, pynvml.NVMLError) as error:
        return [note(name, f"could not be checked: {error}", "look yourself; the other checks were made all the same")]


def _check_torch(version: str | None, gpus: Gpus | None) -> list[Finding]:
    spec = find_spec("torch")
    if spec is None or spec.origin is None or version is None:
        return []  # the check of packages says that it is missing
    build = devices.read_torch(Path(spec.origin).parent / "version.py", version)
    return devices.check_torch(build, gpus)
