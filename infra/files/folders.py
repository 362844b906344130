"""Folders that may not exist yet."""

import errno
import stat
from pathlib import Path

from infra.refusal import Refusal

DENIED = (errno.EPERM, errno.EACCES, errno.EROFS)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents if they are missing. Raises Refusal where this user may not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in DENIED:
            raise
        raise Refusal(
            f"{folder} cannot be created ({error.strerror}): start in a folder that you may write to, or choose others "
            "by $DRAFTSMITH_RUNS, $DRAFTSMITH_CACHE and $PREFECT_HOME"
        ) from error


def private_mode(parent: Path) -> int:
    """Mode, less the umask, of a new folder in `parent` that other users may not enter.

    A folder that hands its group on (`chmod g+s`) is shared among this group on purpose.
    """
    return 0o770 if parent.stat().st_mode & stat.S_ISGID else 0o700


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
