"""Shared memory that SGLang servers leave behind is removed; that of live ones stays."""

import fcntl
import mmap
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.sglang import leftovers
from infra.sglang.leftovers import Leftovers

HOLDER = """
import mmap, sys
file = open(sys.argv[1], "r+b")
kept = mmap.mmap(file.fileno(), 0)
file.close()
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", folder)
    return folder


def segment(memory: Path, size: int = 4096) -> Path:
    path = memory / f"sglang_loads_{uuid.uuid4().hex[:12]}_01234567.shm"
    path.write_bytes(b"x" * size)
    return path


def wait_for_the_clock_of_files(memory: Path) -> None:
    """It is some milliseconds behind."""
    begun, probe = time.time(), memory / "probe"
    while not probe.exists() or probe.stat().st_ctime < begun:
        time.sleep(0.01)
        probe.touch()


@pytest.fixture
def mapped(memory: Path) -> Iterator[Path]:
    """A segment that another process has mapped."""
    path = segment(memory)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"mapped\n"
    yield path
    process.kill()
    process.wait(30)


def test_a_server_that_ended_before_it_was_looked_at_leaves_nothing(tmp_path: Path, memory: Path, mapped: Path) -> None:
    older = segment(memory)
    wait_for_the_clock_of_files(memory)
    removed = Leftovers(tmp_path / "server.leftovers")
    wait_for_the_clock_of_files(memory)
    dead, unsized, locked = segment(memory), segment(memory, 0), segment(memory)
    mapped.touch()
    with locked.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        removed.remove()
    assert not dead.exists()
    assert all(path.exists() for path in (older, mapped, unsized, locked))


def test_listed_folders_go_with_their_segments(tmp_path: Path, memory: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "tmpabc").touch()
    named = memory / "sglang_loads_tmpabc_01234567.shm"
    named.touch()
    first = Leftovers(tmp_path / "server.leftovers")
    first.add(folder)
    Leftovers(tmp_path / "server.leftovers").remove()
    assert not folder.exists()
    assert not named.exists()


def test_what_lives_is_remembered(tmp_path: Path, memory: Path) -> None:
    path = segment(memory)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert path in leftovers._mapped([int(Path("/proc/self").readlink().name)])
