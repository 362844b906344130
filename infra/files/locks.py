"""Ownership is an flock: it ends with its holder, however that ends.

A lock's descriptor may be handed to supervisors (`Lock.descriptor`): it is then free only when they are gone too.
"""

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infra.files.folders import make_folder, private_mode
from infra.refusal import Refusal

POLL_S = 0.1
SWEEP_S = 2.0
"""A sweep that looks at a folder holds its lock for less."""
LOCK_FILE = 0o666
"""Mode of lock files, less the umask: whoever shares a folder of runs among a group opens its locks for writing."""
SHARED_FOLDER = 0o1777
"""Everybody may create files there, and remove only their own."""
GONE = ".gone-"
"""In the name of a folder that is being removed."""
LOCKLESS_S = 86_400.0
"""A folder without a lock is swept when it is older than this."""
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What `flock` answers on a file system that has no locks."""
WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What `link` answers on a file system that has no hard links."""


class LockHeldError(Exception):
    """Somebody else holds the lock."""


@dataclass(frozen=True)
class Lock:
    """A held lock."""

    path: Path
    descriptor: int


@contextmanager
def hold(path: Path, wait_s: float = 0.0, for_everybody: bool = False) -> Iterator[Lock]:
    """Hold the exclusive lock at `path`; raises LockHeldError when it is not free within `wait_s` seconds.

    A lock `for_everybody` is one that other users of this machine take too: its folder is made with the mode of /tmp.
    Raises PermissionError where its owner keeps others out, and OSError for a folder or file that is a symbolic link,
    which another user might have placed there. Raises Refusal on a file system without locks.
    """
    if for_everybody:
        _make_shared_folder(path.parent)
    descriptor = _lock(path, wait_s, for_everybody)
    try:
        yield Lock(path, descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path, wait_s: float, for_everybody: bool) -> int:
    """A descriptor that holds the lock. The lock counts only if its file is still the one at `path`."""
    deadline = time.monotonic() + wait_s
    while True:
        with ExitStack() as undo:
            descriptor = _open(path, for_everybody)
            undo.callback(os.close, descriptor)
            taken = _try(descriptor, path)
            if taken and _is_at(descriptor, path):
                undo.pop_all()
                return descriptor
        if not taken:
            if time.monotonic() >= deadline:
                raise LockHeldError(str(path))
            time.sleep(POLL_S)


def _open(path: Path, for_everybody: bool) -> int:
    """Open the lock file; create it if it is missing.

    It is opened for writing although nothing is ever written: NFS implements flock by locks of fcntl, and an exclusive
    one needs a descriptor that is open for writing. An existing file is opened without O_CREAT, which Linux refuses in
    a folder like /tmp when the file belongs to another user (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        make_folder(path.parent)
        with suppress(FileExistsError, FileNotFoundError):
            if for_everybody:
                _create_for_everybody(path)
            else:
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, LOCK_FILE)


def _create_for_everybody(path: Path) -> None:
    """Create the file so that it appears with its mode, whatever the umask is: others may open it at once.

    Where the file system has no hard links, it has its mode a moment later.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.fchmod(descriptor, LOCK_FILE)
        os.link(name, path)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        with path.open("x") as file:
            os.fchmod(file.fileno(), LOCK_FILE)
    finally:
        os.close(descriptor)
        os.unlink(name)


def _make_shared_folder(folder: Path) -> None:
    """Make a folder that is every user's; one that is there must be a folder, not a link to one."""
    if not os.path.lexists(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        aside.chmod(SHARED_FOLDER)
        try:
            aside.rename(folder)
        except OSError:  # another process was faster: below it is seen what it made
            aside.rmdir()
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) != SHARED_FOLDER:
        folder.chmod(SHARED_FOLDER)


def _try(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise Refusal(
            f"{path} is on a file system without locks ({error.strerror}): have it mounted with locks (Lustre: -o "
            "flock; NFS: with its lock service), or set what names the folder ($DRAFTSMITH_RUNS, $DRAFTSMITH_CACHE or "
            "$TMPDIR) to one on another file system"
        ) from error
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path still names the open file; its folder may have been removed and recreated by a new owner."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@contextmanager
def own_folder(folder: Path) -> Iterator[Lock]:
    """Make `folder`, hold the lock inside it, and remove it at the end.

    It appears with its lock already held, so that a sweep never sees it unowned, and other users may not enter it.
    Raises LockHeldError when another process holds it, and Refusal for a link, or a folder of another user outside of
    folders that a group shares (`chmod g+s`). What a dead owner left under the name is removed first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_place(folder)
    if not _remove_if_free(folder, SWEEP_S):
        raise LockHeldError(str(folder))
    aside = folder.with_name(f".new-{os.getpid()}-{folder.name}")
    aside.mkdir(private_mode(folder.parent), exist_ok=True)
    with hold(aside / "lock") as lock:
        try:
            aside.rename(folder)
        except OSError as error:
            shutil.rmtree(aside)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise LockHeldError(str(folder)) from error  # somebody else was faster
        try:
            yield Lock(folder / "lock", lock.descriptor)
        finally:
            _remove(folder)


def _check_place(folder: Path) -> None:
    with suppress(FileNotFoundError):
        found = folder.lstat()
        is_folder, shared = stat.S_ISDIR(found.st_mode), folder.parent.stat().st_mode & stat.S_ISGID
        if not is_folder or (found.st_uid != os.getuid() and not shared):
            raise Refusal(
                f"{folder} is a {'folder' if is_folder else 'link or a file'} of user {found.st_uid}, where this run's "
                "data should be: have it removed, or set $DRAFTSMITH_SHM to another folder in memory"
            )


def sweep(parent: Path, pattern: str = "draftsmith-*") -> list[Path]:
    """Remove the folders below `parent` whose owner is gone; return them. Other users' folders are left alone."""
    return [
        folder
        for folder in parent.glob(pattern)
        if _is_own_folder(folder) and not _has_lost_its_lock(folder) and _remove_if_free(folder)
    ]


def _has_lost_its_lock(folder: Path) -> bool:
    """Whether the folder's owner may live although no lock says so.

    Systemd empties /dev/shm when its user has logged out (RemoveIPC), and processes of a living run make their folder
    there again.
    """
    if GONE in folder.name or (folder / "lock").exists():
        return False
    try:
        return time.time() - folder.stat().st_mtime < LOCKLESS_S
    except FileNotFoundError:  # another sweep has just removed it
        return False


def _is_own_folder(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _remove_if_free(folder: Path, wait_s: float = 0.0) -> bool:
    """Remove a folder whose lock is free; return whether it is gone."""
    if not folder.exists():
        return True
    try:
        with hold(folder / "lock", wait_s):
            _remove(folder)
    except LockHeldError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove a folder whose lock is held. It goes as a whole: half removed it would lose its lock before its content.

    A sweep finds by its name what is left of it if this process dies meanwhile.
    """
    with suppress(FileNotFoundError):
        gone = folder.rename(folder.with_name(f"{folder.name}{GONE}{secrets.token_hex(4)}"))
        shutil.rmtree(gone, ignore_errors=True)
