"""What an SGLang server leaves behind even when it ends well: shared memory, sockets.

Its names are known only while it lives, so they are written down then: a killed starter's successor removes them.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from infra.files.atomic import write_atomically
from infra.processes.supervisor import descendants

SHARED_MEMORY = Path("/dev/shm")
"""SGLang's own choice, whatever our transport uses."""


class Leftovers:
    """Files and folders to be removed after a server, listed in a file."""

    def __init__(self, list_file: Path):
        self._list = list_file
        self._begun = time.time()

    def add(self, path: Path) -> None:
        """Remember a file or folder that was made for the server."""
        self._write({*self._read(), path})

    def add_shared_memory(self, pid: int) -> None:
        """Remember the segments in shared memory that processes below `pid` made since this object was."""
        found = set(self._read())
        for path in _mapped(descendants(pid)):
            with suppress(FileNotFoundError):  # unlinked meanwhile
                if path.stat().st_ctime >= self._begun:
                    found.add(path)
        self._write(found)

    def remove(self) -> None:
        """Remove what is listed, and segments that a server left which ended before it was looked at. Idempotent."""
        for path in self._read():
            if path.is_dir():
                for socket in path.iterdir():
                    for segment in SHARED_MEMORY.glob(f"sglang_*_{socket.name}_*"):
                        segment.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for segment in _abandoned(self._begun):
            segment.unlink(missing_ok=True)
        self._list.unlink(missing_ok=True)

    def _read(self) -> list[Path]:
        return [Path(line) for line in self._list.read_text().splitlines()] if self._list.is_file() else []

    def _write(self, paths: set[Path]) -> None:
        write_atomically(self._list, "".join(f"{path}\n" for path in sorted(paths)))


def _abandoned(since: float) -> set[Path]:
    """Load snapshots of SGLang 0.5.23 of this user, made since a point in time, whose server is dead.

    Their names are random. The server sizes and maps its segment under a lock, so one that has a size, that nobody
    has locked and that no process maps is a dead server's.
    """
    unlocked = set()
    for segment in SHARED_MEMORY.glob("sglang_loads_*.shm"):
        with suppress(FileNotFoundError, PermissionError, BlockingIOError), segment.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = os.fstat(file.fileno())
            if state.st_uid == os.getuid() and state.st_ctime >= since and state.st_size:
                unlocked.add(segment)
    if not unlocked:
        return set()
    # Looked up after the locks: whoever had sized its segment by then has mapped it, or is dead.
    return unlocked - _mapped(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _mapped(pids: Iterable[int]) -> set[Path]:
    """Files directly in shared memory that these processes have mapped."""
    found: set[Path] = set()
    for process in pids:
        try:
            maps = Path(f"/proc/{process}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found |= {Path(fields[5]) for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return {path for path in found if path.parent == SHARED_MEMORY and path.is_file()}
