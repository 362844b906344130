"""Probes of interpreter, cores, memory, limits, and of the folders that runs live in.

`root` stands for `/`: `/proc` and `/sys` are read below it. Nothing is left behind: probes are temporary files, and a
dead run's folder is reported, never removed.
"""

import fcntl
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

from infra.doctor.finding import Finding, judge
from infra.files.folders import existing
from infra.ledger.database import refuse_network_file_system
from infra.processes.control_groups import cpu_quota, memory_limit
from infra.quantities import byte_size
from infra.refusal import Refusal
from infra.transport.budget import LEAST_BUDGET

PYTHONS = ((3, 11), (3, 13))
GIB = 2**30
LEAST_MEMORY = 2 * GIB
"""Flow, target, trainer and servers of the quickstart hold about this much; an estimate, on the low side."""
GOOD_MEMORY = 4 * GIB
FEW_FILES = 1024
FEW_PROCESSES = 1024
LEAST_DISK = 1 * GIB
"""The quickstart's converted target takes 0.6 GiB in the cache, its run folder 0.4 GiB."""
GOOD_DISK = 10 * GIB
CLOCK_TOLERANCE_S = 5.0


def python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """Whether Draftsmith runs on this interpreter."""
    found = f"{'.'.join(map(str, version))} at {sys.executable}"
    return judge(found, problem=not PYTHONS[0] <= version <= PYTHONS[1])


def processor(kind: str = platform.machine()) -> Finding:
    """Whether Draftsmith was ever run on such a processor."""
    if kind == "x86_64":
        return judge(kind)
    if kind == "aarch64":
        return judge("aarch64: every package has a build for it, but Draftsmith is untested on it", note=True)
    return judge(f"{kind}: torch and other packages have no builds for it", problem=True)


def cores(root: Path = Path("/"), affinity: int | None = None) -> Finding:
    """Cores by affinity and by the control group's quota."""
    seen, quota = len(os.sched_getaffinity(0)) if affinity is None else affinity, cpu_quota(root)
    limited = "" if quota is None else f" visible, and the control group's quota allows {quota:g}"
    return judge(f"{seen}{limited}", note=quota is not None and quota < 1)


def memory(root: Path = Path("/")) -> Finding:
    """Memory of the machine, or of the control group if that is less."""
    whole = psutil.virtual_memory()
    total, available = whole.total, whole.available
    found = f"{byte_size(available)} available of {byte_size(total)}"
    limit, used = memory_limit(root) or (total, 0)
    if limit < total:
        # Page cache counts as used here although it is given back: the figure errs on the careful side.
        left = max(0, limit - used)
        found = f"{byte_size(left)} left of the control group's {byte_size(limit)}; {found} in the machine"
        available = min(available, left)
    return judge(found, problem=available < LEAST_MEMORY, note=available < GOOD_MEMORY)


def open_files(limit: int | None = None) -> Finding:
    """The (soft) limit on open files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return _limited(soft, FEW_FILES, "for each process")


def processes(limit: int | None = None) -> Finding:
    """The (soft) limit on processes, with their threads, of this user."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0] if limit is None else limit
    return _limited(soft, FEW_PROCESSES, "of this user, each thread counted")


def _limited(soft: int, few: int, what: str) -> Finding:
    unlimited = soft == resource.RLIM_INFINITY
    shown = "unlimited" if unlimited else f"at most {soft}"
    return judge(f"{shown} {what}", note=not unlimited and soft < few)


def shared_memory(folder: Path, budget_mib: int = LEAST_BUDGET >> 20) -> Finding:
    """Whether hidden states fit into shared memory, as infra/transport/choice.py will decide."""
    if not folder.is_dir():
        return judge(f"{folder} does not exist", note=True)
    room, budget, writable = shutil.disk_usage(folder), budget_mib * 2**20, _is_writable(folder)
    found = f"{folder}: {byte_size(room.free)} free of {byte_size(room.total)}" + ("" if writable else ", not writable")
    small = room.total < 2 * budget
    if small or room.free < budget:
        found += f", {'less than twice' if small else 'less than'} the usual budget of {budget_mib} MiB"
    return judge(found, problem=not writable or (not small and room.free < budget), note=small)


def leftovers(folder: Path) -> Finding:
    """Folders in shared memory whose owner is gone."""
    paths = [
        path for path in sorted(folder.glob("draftsmith-*")) if path.is_dir() and path.stat().st_uid == os.getuid()
    ]
    dead = [path for path in paths if not _is_locked(path / "lock")]
    found = f"{len(paths) - len(dead)} in use, {len(dead)} left over by dead runs"
    if dead:
        size = sum(file.stat().st_size for path in dead for file in path.rglob("*") if file.is_file())
        names = ", ".join(path.name for path in dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
        found += f" ({byte_size(size)}): {names}"
    return judge(found, note=bool(dead))


def run_folder(folder: Path, mounts: Path = Path("/proc/mounts")) -> Finding:
    """Room and file system of the folder that runs are written to."""
    try:
        refuse_network_file_system(folder / "run" / "ledger.sqlite", mounts)
    except Refusal as error:
        return judge(f"{folder} is on a network file system", problem=True, remedy=str(error))
    return disk(folder)


def disk(folder: Path) -> Finding:
    """Room for run folders, converted targets, tokenized samples."""
    place = existing(folder)
    free, writable = shutil.disk_usage(place).free, _is_writable(place)
    found = f"{folder}: {byte_size(free)} free" + ("" if place == folder else ", made by the first run")
    found += "" if writable else f"; {place} is not writable"
    return judge(found, problem=not writable or free < LEAST_DISK, note=free < GOOD_DISK)


def file_locks(*folders: Path) -> Finding:
    """Whether `flock` excludes other processes, and the file system's clock agrees with the machine's.

    Of several folders, the first one where something is amiss, or else the first one.
    """
    findings = [_file_locks(existing(folder)) for folder in folders]
    return next((finding for finding in findings if finding.verdict != "ok"), findings[0])


def _file_locks(place: Path) -> Finding:
    try:
        held = tempfile.NamedTemporaryFile(dir=place, prefix=".draftsmith-doctor-")  # noqa: SIM115
    except OSError as error:
        return judge(f"no file can be made in {place}: {error.strerror}", problem=True)
    with held as file:
        ahead_s = Path(file.name).stat().st_mtime - time.time()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return judge(f"{place} is on a file system without locks: {error.strerror}", problem=True)
        excludes = _is_locked(Path(file.name))
    if not excludes:
        return judge(f"`flock` on {place} does not exclude a second holder", problem=True)
    if abs(ahead_s) > CLOCK_TOLERANCE_S:
        return judge(f"held on {place}, whose clock is {ahead_s:+.0f} s from this machine's", note=True)
    return judge(f"held on {place}, and its clock agrees with this machine's")


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _is_locked(lock: Path) -> bool:
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
