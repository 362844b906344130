"""What an SGLang server leaves behind even when it ends well: shared memory, sockets. Used by whoever starts one.

Its names are known only while it lives, so they are written down then: a killed starter's successor removes them.
"""

import shutil
import time
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
        self._write({*self._read(), *(path for path in _mapped(pid) if path.stat().st_ctime >= self._begun)})

    def remove(self) -> None:
        """Remove what is listed, and segments named after a listed folder's files. Idempotent."""
        for path in self._read():
            if path.is_dir():
                for socket in path.iterdir():
                    for segment in SHARED_MEMORY.glob(f"sglang_*_{socket.name}_*"):
                        segment.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._list.unlink(missing_ok=True)

    def _read(self) -> list[Path]:
        return [Path(line) for line in self._list.read_text().splitlines()] if self._list.is_file() else []

    def _write(self, paths: set[Path]) -> None:
        write_atomically(self._list, "".join(f"{path}\n" for path in sorted(paths)))


def _mapped(pid: int) -> set[Path]:
    """Files directly in shared memory that processes below `pid` have mapped."""
    found: set[Path] = set()
    for process in descendants(pid):
        try:
            maps = Path(f"/proc/{process}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found |= {Path(fields[5]) for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return {path for path in found if path.parent == SHARED_MEMORY and path.is_file()}
