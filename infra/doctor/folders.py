"""Checks of the folders that runs live in: shared memory, run folder, cache.

Nothing is left behind: probes are temporary files, and a dead run's folder is reported, never removed.
"""

import fcntl
import os
import tempfile
import time
from pathlib import Path

from infra.config import TransportConfig
from infra.doctor.finding import GIB, Finding, note, ok, problem
from infra.ledger.database import refuse_network_file_system
from infra.quantities import byte_size
from infra.refusal import Refusal

LEAST_DISK = 1 * GIB
"""The quickstart's converted target takes 0.6 GiB in the cache, its run folder 0.4 GiB."""
GOOD_DISK = 10 * GIB
CLOCK_TOLERANCE_S = 5.0


def check_shared_memory(folder: Path, budget_mib: int = TransportConfig().budget_mib) -> list[Finding]:
    """Whether hidden states fit into shared memory, as infra/transport/choice.py will decide."""
    name, budget = "shared memory", budget_mib * 2**20
    fallback = "runs keep their objects in the run folder, which is slower"
    if not folder.is_dir():
        return [note(name, f"{folder} does not exist", f"none needed: {fallback}; or set DRAFTSMITH_SHM")]
    room = os.statvfs(folder)
    total, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    found = f"{folder}: {byte_size(free)} free of {byte_size(total)}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return [problem(name, f"{found}, not writable", "make it writable, or set DRAFTSMITH_SHM to a tmpfs of yours")]
    if total < 2 * budget:
        remedy = f"a container gets more by `--shm-size=2g`; as it is, {fallback}"
        return [note(name, f"{found}, less than twice the usual budget of {budget_mib} MiB", remedy)]
    if free < budget:
        remedy = "delete what fills it, or lower transport.budget_mib"
        return [problem(name, f"{found}, less than the usual budget of {budget_mib} MiB", remedy)]
    return [ok(name, found)]


def check_leftovers(folder: Path) -> list[Finding]:
    """Folders in shared memory whose owner is gone."""
    if not folder.is_dir():
        return []
    dead, alive = [], 0
    for path in sorted(folder.glob("draftsmith-*")):
        if not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        if _is_locked(path / "lock"):
            alive += 1
        else:
            dead.append(path)
    running = f"{alive} in use" if alive else "none in use"
    if not dead:
        return [ok("run folders in memory", f"{running}, none left over")]
    size = sum(file.stat().st_size for path in dead for file in path.rglob("*") if file.is_file())
    names = ", ".join(path.name for path in dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
    found = f"{running}, {len(dead)} left over by dead runs ({byte_size(size)}): {names}"
    return [note("run folders in memory", found, "nothing to do: the next run removes them")]


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_runs_folder(folder: Path, mounts: Path = Path("/proc/mounts")) -> list[Finding]:
    """Room, file system, locks and clock of the folder that runs are written to."""
    name = "run folder"
    try:
        refuse_network_file_system(folder / "run" / "ledger.sqlite", mounts)
    except Refusal as error:
        return [problem(name, f"{folder} is on a network file system", str(error))]
    return [*_check_room(name, folder, "DRAFTSMITH_RUNS"), *_check_locks(_existing(folder))]


def check_cache_folder(folder: Path) -> list[Finding]:
    """Room for converted targets and tokenized samples."""
    return _check_room("cache folder", folder, "DRAFTSMITH_CACHE")


def _existing(folder: Path) -> Path:
    """The folder, or what exists above it."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _check_room(name: str, folder: Path, variable: str) -> list[Finding]:
    place = _existing(folder)
    room = os.statvfs(place)
    free = room.f_frsize * room.f_bavail
    found = f"{folder}: {byte_size(free)} free" + ("" if place == folder else ", made by the first run")
    if not os.access(place, os.W_OK | os.X_OK):
        return [problem(name, f"{found}; {place} is not writable", f"set {variable} to a folder of yours")]
    if free < LEAST_DISK:
        return [problem(name, found, f"free {byte_size(LEAST_DISK)}, or set {variable} to a larger disk")]
    if free < GOOD_DISK:
        return [note(name, found, f"enough for the quickstart; larger targets want more: set {variable}")]
    return [ok(name, found)]


def _check_locks(folder: Path) -> list[Finding]:
    """Whether `flock` excludes other processes, and the file system's clock agrees with the machine's."""
    name = "file locks"
    try:
        held = tempfile.NamedTemporaryFile(dir=folder, prefix=".draftsmith-doctor-")  # noqa: SIM115
    except OSError as error:
        remedy = "make it writable, or set DRAFTSMITH_RUNS to a folder of yours"
        return [problem(name, f"no file can be made in {folder}: {error.strerror}", remedy)]
    with held as file:
        written = Path(file.name).stat().st_mtime
        ahead = written - time.time()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        excludes = _is_locked(Path(file.name))
    if not excludes:
        remedy = "put the run folder on a local disk (DRAFTSMITH_RUNS): ownership of runs rests on these locks"
        return [problem(name, f"`flock` on {folder} does not exclude a second holder", remedy)]
    if abs(ahead) > CLOCK_TOLERANCE_S:
        remedy = "synchronise the clocks (chrony, NTP), or put the run folder on a local disk"
        return [note(name, f"held on {folder}, whose clock is {ahead:+.0f} s from this machine's", remedy)]
    return [ok(name, f"held on {folder}, and its clock agrees with this machine's")]
