"""What the control groups of this process, a container's for instance, allow it: cores and memory.

`root` stands for `/`: `/proc` and `/sys` are read below it.
"""

import os
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Cores that this process can keep busy: by its affinity, and by the quota of its control groups.

    More threads than a quota allows use it up at once, and then all stand still until its next period.
    """
    seen = len(os.sched_getaffinity(0))
    with suppress(OSError):  # a system without control groups
        if (quota := cpu_quota()) is not None:
            return max(1, min(seen, int(quota)))
    return seen


def memory() -> int:
    """Bytes of the machine's memory, or of what the control groups of this process allow if that is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        if limit := memory_limit():
            return min(whole, limit[0])
    return whole


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
