"""What control groups allow, read from made-up /proc and /sys trees."""

import os
from pathlib import Path

import pytest

from infra.processes import control_groups


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# Control groups: version 2, version 1, both at once, a parent's limit, and a container's path that is the host's.
GROUPS = {
    "none": ({"proc/self/cgroup": "0::/\n"}, None),
    "v2 without a limit": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
    "v2": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
    "v2 parent": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
        },
        2.0,
    ),
    "v1": (
        {
            "proc/self/cgroup": "4:memory:/x\n1:cpu,cpuacct:/x\n0::/\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "v1 path of the host": (
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_quotas_are_read(tmp_path: Path, name: str) -> None:
    files, quota = GROUPS[name]
    write(tmp_path, files)
    assert control_groups.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("quota", "cores"), [(None, 16), (0.5, 1), (3.9, 3), (64.0, 16)])
def test_no_more_threads_than_the_quota_keeps_busy(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(control_groups, "cpu_quota", lambda: quota)
    assert control_groups.cores() == cores


def test_a_system_without_control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cpu_quota", "memory_limit"):
        there = getattr(control_groups, name)
        monkeypatch.setattr(control_groups, name, lambda there=there: there(tmp_path))
    assert control_groups.cores() == len(os.sched_getaffinity(0))
    assert control_groups.memory() > 2**30


def test_the_memory_of_a_container_is_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, expected in ((2**30, 2**30), (2**62, whole)):
        monkeypatch.setattr(control_groups, "memory_limit", lambda limit=limit: (limit, 5))
        assert control_groups.memory() == expected
