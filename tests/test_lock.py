"""What is installed is what the lock files name: an upgrade of a package that nobody named cannot break a first run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
BESIDE_THE_LOCK = {"pip", "setuptools", "draftsmith", "draftsmith-sglang-test-equipment"}
"""What `python -m venv` brings, and our own distributions."""
LIST = """
import importlib.metadata, json
print(json.dumps(sorted({(d.name, d.version) for d in importlib.metadata.distributions()})))
"""


def locked_versions(*files: str) -> dict[str, set[Version]]:
    """Versions by package name; a package may have one for each environment marker."""
    versions: dict[str, set[Version]] = {}
    for file in files:
        for line in (REQUIREMENTS / file).read_text().splitlines():
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if text:
                requirement = Requirement(text)
                (pinned,) = requirement.specifier
                assert pinned.operator == "==", f"{file}: {text} is not pinned"
                versions.setdefault(canonicalize_name(requirement.name), set()).add(Version(pinned.version))
    return versions


@pytest.mark.parametrize(
    ("python", "files"),
    [
        (sys.executable, ("lock.txt", "speculators-no-deps.txt", "installer.txt")),
        (
            str(ROOT / ".venv-sglang" / "bin" / "python"),
            ("sglang-cpu-lock.txt", "sglang-cpu-no-deps.txt", "installer.txt"),
        ),
    ],
    ids=["main", "sglang"],
)
def test_installed_packages_are_the_locked_ones(python: str, files: tuple[str, ...]) -> None:
    locked = locked_versions(*files)
    listed = subprocess.run([python, "-I", "-c", LIST], capture_output=True, text=True, check=True, timeout=300)
    installed = {canonicalize_name(name): Version(version) for name, version in json.loads(listed.stdout)}
    assert len(installed) > 50
    different = {
        name: str(version)
        for name, version in installed.items()
        # A build of torch for a certain device has a local version: 2.13.0+cpu.
        if name not in BESIDE_THE_LOCK and Version(version.public) not in locked.get(name, set())
    }
    assert not different, f"not as locked; run `make lock` after a change of requirements, then install: {different}"


def test_the_scheduler_s_known_breakage_is_refused() -> None:
    """Prefect 3.8.8's scheduler creates no run with SQLAlchemy 2.1."""
    assert all(version < Version("2.1") for version in locked_versions("lock.txt")["sqlalchemy"])
