"""Provenance of a run: code, versions, hardware."""

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infra.pools.gpus import visible_gpus
from infra.pools.local import cores

PACKAGES = ("torch", "transformers", "lightning", "sglang", "prefect", "mlflow")


@cache
def git_sha() -> str:
    """Commit of the code that runs, `-dirty` where files differ from it; `unknown` outside a repository.

    As it was when first asked: what a process writes to the repository is not what it runs.
    """
    folder = Path(__file__).parent
    try:
        sha = _git(folder, "rev-parse", "HEAD")
        return f"{sha}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else sha
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Installed versions of what decides a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> str:
    """Cores and GPUs in words."""
    gpus = visible_gpus()
    return f"{cores()} CPU cores ({platform.machine()}), {len(gpus)} GPUs"
