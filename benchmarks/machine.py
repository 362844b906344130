"""What a benchmark is measured under: code, day, machine."""

import time
from pathlib import Path

from infra.provenance import git_sha, hardware

UNDER = ("commit", "date", "hardware", "cpu")


def measured_here() -> dict[str, str]:
    """Commit, day, cores and processor of what is measured now."""
    return dict(zip(UNDER, (git_sha(), time.strftime("%Y-%m-%d"), hardware(), cpu_model()), strict=True))


def cpu_model() -> str:
    """The processor's name; empty where Linux has none for it."""
    return cpu_info("model name")


def cpu_info(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
