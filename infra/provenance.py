"""Provenance of a run: code, versions, hardware."""

import json
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from infra.pools.gpus import visible_gpus
from infra.processes.control_groups import cores

PACKAGES = ("torch", "transformers", "lightning", "sglang", "prefect", "mlflow")


@cache
def git_sha() -> str:
    """Commit of the code that runs, `-dirty` where files differ from it; outside its repository what was installed.

    As it was when first asked: what a process writes to the repository is not what it runs.
    """
    folder = Path(__file__).parent
    try:
        # An environment may lie in somebody else's repository, which does not track what is installed in it.
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        sha = _git(folder, "rev-parse", "HEAD")
        return f"{sha}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else sha
    except (OSError, subprocess.SubprocessError):
        return _installed()


def _installed() -> str:
    """The commit that pip took the package from, else the version in its metadata, which an image names."""
    try:
        package = distribution("draftsmith")
    except PackageNotFoundError:
        return "unknown"
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    return origin.get("vcs_info", {}).get("commit_id") or package.version


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
