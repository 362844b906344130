"""Checks of interpreter, cores, memory and limits.

`root` stands for `/` everywhere: `/proc` and `/sys` are read below it.
"""

import resource
import sys
from pathlib import Path

from infra.doctor.finding import GIB, Finding, note, ok, problem
from infra.pools.local import cores as visible_cores
from infra.quantities import byte_size

PYTHONS = ((3, 11), (3, 13))
LEAST_MEMORY = 2 * GIB
"""Flow, target, trainer and servers of the quickstart hold about this much; an estimate, on the low side."""
GOOD_MEMORY = 4 * GIB
FEW_FILES = 1024


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    """Whether Draftsmith runs on this interpreter."""
    found = f"{'.'.join(map(str, version))} at {sys.executable}"
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return [ok("Python", found)]
    return [problem("Python", found, "make the environment anew with Python 3.11, 3.12 or 3.13")]


def check_cores(root: Path = Path("/"), affinity: int | None = None) -> list[Finding]:
    """Cores by affinity and by the control group's quota."""
    seen = visible_cores() if affinity is None else affinity
    quota = cpu_quota(root)
    if quota is not None and quota < seen:
        whole = max(1, int(quota))
        remedy = f"start under `taskset -c 0-{whole - 1}`: otherwise {seen} threads share what {whole} could do"
        return [note("cores", f"{seen} visible, but the control group's quota allows {quota:g}", remedy)]
    limited = "" if quota is None else f" (the control group's quota: {quota:g})"
    return [ok("cores", f"{seen}{limited}")]


def check_memory(root: Path = Path("/")) -> list[Finding]:
    """Memory of the machine, or of the control group if that is less."""
    total, available = _memory_info(root)
    found = f"{byte_size(available)} available of {byte_size(total)}"
    limit = memory_limit(root)
    if limit is not None and limit[0] < total:
        # Page cache counts as used here although it is given back: the figure errs on the careful side.
        left = max(0, limit[0] - limit[1])
        found = (
            f"{byte_size(left)} left of the control group's {byte_size(limit[0])} (the machine has {byte_size(total)})"
        )
        available = min(available, left)
    if available < LEAST_MEMORY:
        return [problem("memory", found, f"free some: the quickstart needs at least {byte_size(LEAST_MEMORY)}")]
    if available < GOOD_MEMORY:
        return [note("memory", found, f"{byte_size(GOOD_MEMORY)} are comfortable; close what you do not need")]
    return [ok("memory", found)]


def check_open_files(limits: tuple[int, int] | None = None) -> list[Finding]:
    """The limit on open files; `limits` is (soft, hard)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        reach = FEW_FILES if hard == resource.RLIM_INFINITY else min(FEW_FILES, hard)
        return [note("open files", f"at most {found} for each process", f"`ulimit -n {reach}` before you start")]
    return [ok("open files", f"at most {found} for each process")]


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores that the control groups (version 2 or 1) of this process allow; None without a quota."""
    quotas = []
    for group in _groups(root, "cpu"):
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        elif (group / "cpu.cfs_quota_us").is_file():
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        else:
            continue
        if quota != "max" and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> tuple[int, int] | None:
    """(limit, used) in bytes of the tightest control group of this process; None without a limit."""
    limits = []
    for group in _groups(root, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (group / limit).is_file() and (group / limit).read_text().strip() != "max":
                limits.append((int((group / limit).read_text()), int((group / used).read_text())))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=None)


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process' control groups, each with those above it."""
    mount = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        inner = top / place.lstrip("/")
        # In a container the path may be the host's: then only the top exists.
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return folders


def _memory_info(root: Path) -> tuple[int, int]:
    """(total, available) bytes."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    return sizes["MemTotal"], sizes["MemAvailable"]
