"""Ownership is an flock: it ends with its holder, however that ends. Used by the process that starts a run.

A lock's descriptor may be handed to supervisors (`Lock.descriptor`): it is then free only when they are gone too.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.1


class LockHeldError(Exception):
    """Somebody else holds the lock."""


@dataclass(frozen=True)
class Lock:
    """A held lock."""

    path: Path
    descriptor: int


@contextmanager
def hold(path: Path, wait_s: float = 0.0) -> Iterator[Lock]:
    """Hold the exclusive lock at `path`; raises LockHeldError when it is not free within `wait_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while not _try(descriptor):
            if time.monotonic() >= deadline:
                raise LockHeldError(str(path))
            time.sleep(POLL_S)
        yield Lock(path, descriptor)
    finally:
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def own_folder(folder: Path) -> Iterator[Lock]:
    """Make `folder`, hold the lock inside it, and remove it at the end.

    It appears with its lock already held, so that a sweep never sees it unowned. Raises LockHeldError when it is
    somebody else's; what a dead owner left under the name is removed first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not _remove_if_free(folder):
        raise LockHeldError(str(folder))
    aside = folder.with_name(f".new-{os.getpid()}-{folder.name}")
    with hold(aside / "lock") as lock:
        aside.rename(folder)
        try:
            yield Lock(folder / "lock", lock.descriptor)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path, pattern: str = "draftsmith-*") -> list[Path]:
    """Remove the folders below `parent` whose owner is gone; return them. Other users' folders are left alone."""
    candidates = (path for path in parent.glob(pattern) if path.is_dir() and path.stat().st_uid == os.getuid())
    return [folder for folder in candidates if _remove_if_free(folder)]


def _remove_if_free(folder: Path) -> bool:
    """Remove a folder whose lock is free; return whether it is gone."""
    if not folder.exists():
        return True
    try:
        with hold(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)
    except LockHeldError:
        return False
    return True
