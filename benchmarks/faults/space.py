"""File systems that are full for a while, or small from the start. Needs mounts of the run's own."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from faults.base import Missed, Scene, Strike

BALLAST = ".ballast"
CHUNK = 2**16
REFILL_S = 0.1
MNT_DETACH = 2
MS_REMOUNT = 32
MIB = 2**20
SMALL_MEMORY_MIB = 64
"""What Docker gives a container."""
PROBE_S = 30


def namespace_command() -> list[str]:
    """The beginning of a command that may mount file systems nobody else sees; empty where this machine forbids it."""
    command = ["unshare", "--mount", "--propagation", "private"]
    if os.getuid() != 0:
        command += ["--user", "--map-current-user", "--keep-caps"]
    probe = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from faults.space import probe; probe()"
    )
    try:
        tried = subprocess.run(
            [*command, sys.executable, "-c", probe], capture_output=True, timeout=PROBE_S, check=False
        )
    except FileNotFoundError:
        return []
    return command if tried.returncode == 0 else []


def probe() -> None:
    """Raise OSError where nothing may be mounted."""
    with mounted(Path("/tmp"), 1):
        pass


@contextmanager
def mounted(folder: Path, size_mib: int) -> Iterator[Path]:
    """A file system in memory of `size_mib` at `folder`, until the end."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, size_mib, 0)
    try:
        yield folder
    finally:
        _checked(_libc().umount2(os.fsencode(folder), MNT_DETACH), folder)


def resize(folder: Path, size_mib: int) -> None:
    """Change the size of what `mounted` made."""
    _mount(folder, size_mib, MS_REMOUNT)


def _mount(folder: Path, size_mib: int, flags: int) -> None:
    # The program mount(8) wants to be root; the system call wants a capability only.
    options = f"size={size_mib}m,mode=1777".encode()
    _checked(_libc().mount(b"chaos", os.fsencode(folder), b"tmpfs", flags, options), folder)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(status: int, folder: Path) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))


def fill(folder_of: Callable[[Scene], Path]) -> Strike:
    """A ballast file takes all room, and whatever others free meanwhile."""

    @contextmanager
    def strike(scene: Scene) -> Iterator[None]:
        folder = folder_of(scene)
        if not folder.is_dir():
            raise Missed
        healed = threading.Event()
        keeper = threading.Thread(target=_keep_full, args=(folder / BALLAST, healed))
        keeper.start()
        try:
            yield
        finally:
            healed.set()
            keeper.join()
            (folder / BALLAST).unlink(missing_ok=True)

    return strike


def _keep_full(ballast: Path, healed: threading.Event) -> None:
    with ballast.open("wb", buffering=0) as file:
        while not healed.wait(REFILL_S):
            with suppress(OSError):  # full
                while not healed.is_set():
                    file.write(bytes(CHUNK))


@contextmanager
def small_memory(scene: Scene) -> Iterator[None]:
    """Shared memory of 64 MiB."""
    before = os.statvfs(scene.memory)
    resize(scene.memory, SMALL_MEMORY_MIB)
    try:
        yield
    finally:
        resize(scene.memory, before.f_frsize * before.f_blocks // MIB)
