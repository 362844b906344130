"""What a run records of its code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ASK = "from infra.provenance import git_sha; print(git_sha())"


def asked(folder: Path) -> str:
    """`git_sha` of the package in a folder, by a process of its own; other packages are this environment's."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", ASK], cwd=folder, env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package, as pip leaves it in an environment."""
    for package in ("flows", "tasks", "models", "infra"):
        (tmp_path / package).symlink_to(REPOSITORY / package)
    (tmp_path / "infra").unlink()
    # Bytecode is written anew, and would count as changed.
    shutil.copytree(REPOSITORY / "infra", tmp_path / "infra", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = tmp_path / "draftsmith-0.1.0+gabc1234.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: draftsmith\nVersion: 0.1.0+gabc1234\n")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_outside_a_repository_the_installed_version(installed: Path) -> None:
    assert asked(installed) == "0.1.0+gabc1234"


def test_the_commit_that_pip_took_it_from(installed: Path) -> None:
    origin = {"url": "https://example.org/draftsmith.git", "vcs_info": {"vcs": "git", "commit_id": "0123abcd"}}
    (next(installed.glob("*.dist-info")) / "direct_url.json").write_text(json.dumps(origin))
    assert asked(installed) == "0123abcd"


def test_an_environment_inside_another_repository(installed: Path) -> None:
    """Its commit says nothing of ours."""
    git(installed, "init", "--quiet")
    (installed / "theirs.py").write_text("")
    git(installed, "add", "theirs.py")
    git(installed, "commit", "--quiet", "--message", "theirs")
    assert asked(installed) == "0.1.0+gabc1234"


def test_in_its_repository_the_commit_and_whether_files_differ(installed: Path) -> None:
    git(installed, "init", "--quiet")
    git(installed, "add", "infra")
    git(installed, "commit", "--quiet", "--message", "ours")
    commit = git(installed, "rev-parse", "HEAD")
    assert asked(installed) == commit
    (installed / "infra" / "provenance.py").open("a").write("# changed\n")
    assert asked(installed) == f"{commit}-dirty"
