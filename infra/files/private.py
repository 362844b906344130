"""Files made of what users wrote: other users may not read them, and they are removed when their prompts are."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from infra.files.folders import private_mode
from infra.refusal import Refusal

MARK = "private"
"""An empty file in a private folder, or suffix of one beside a private file. Its time is that of the prompts."""


def keep_private(folder: Path, since: float) -> None:
    """Close a folder to other users, and mark it as made of prompts that were sampled at `since` (s since 1970).

    Where its parent hands its group on (`chmod g+s`), the group may still enter. Raises Refusal for an open folder of
    another user.
    """
    mode = stat.S_IMODE(folder.stat().st_mode)
    closed = mode & ~(0o777 ^ private_mode(folder.parent))
    if closed != mode:
        try:
            folder.chmod(closed)
        except PermissionError as error:
            raise Refusal(
                f"{folder} is open to all users of this machine, and is to hold prompts of users: have its owner close "
                f"it: chmod {closed:o} {folder}"
            ) from error
    mark(folder / MARK, since)


def mark_of(file: Path) -> Path:
    """The mark beside a private file."""
    return file.with_suffix(f".{MARK}")


def mark(path: Path, since: float) -> None:
    """Make a mark, unless it is there."""
    with suppress(FileExistsError):
        path.touch(0o666, exist_ok=False)
        os.utime(path, (since, since))
