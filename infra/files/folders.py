"""Folders that may not exist yet."""

import errno
import os
import stat
from pathlib import Path

from infra.refusal import Refusal

DENIED = (errno.EPERM, errno.EACCES, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents if they are missing.

    Raises Refusal where this user may not, or a disk or quota is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in (*DENIED, *FULL):
            raise
        remedy = "free some space" if error.errno in FULL else "start in a folder that you may write to"
        raise Refusal(
            f"{folder} cannot be created ({error.strerror}): {remedy}, or choose others by $DRAFTSMITH_RUNS, "
            "$DRAFTSMITH_CACHE and $PREFECT_HOME"
        ) from error


def check_working_folder() -> None:
    """Raise Refusal where this user may not enter the working folder, or it is gone."""
    try:
        Path.cwd()
        Path().stat()
    except OSError as error:
        raise Refusal(
            f"the working folder cannot be used ({error.strerror}): start in a folder that you may enter"
        ) from error


def private_mode(parent: Path) -> int:
    """Mode, less the umask, of a new folder in `parent` that other users may not enter.

    A folder that hands its group on (`chmod g+s`) is shared among this group on purpose.
    """
    return 0o770 if parent.stat().st_mode & stat.S_ISGID else 0o700


def owner_of(path: Path) -> str:
    """Name of the user to whom a file or folder belongs."""
    try:
        return path.owner()
    except KeyError:  # no entry in /etc/passwd
        return f"user {path.stat().st_uid}"


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    # Below a folder that this user may not enter, Path.is_dir raises PermissionError.
    return next(path for path in (folder, *folder.absolute().parents) if os.path.isdir(path))
