"""Looks at SQLite files through SQLite alone.

Closing a file drops all locks that this process has on it, also those of a connection that is still open.
"""

import os
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

from infra.files.folders import owner_of
from infra.refusal import Refusal
from infra.user import user_name

PRIMARY = 0xFF
"""Bits of SQLite's error codes that name the error; the others say more about it."""


def is_other_file(file: Path) -> bool:
    """Whether a file holds something that is no SQLite database."""
    try:
        # `rw`: a file that has just been removed is not made again.
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.DatabaseError as error:
        # Locked, full or damaged further on is not for this question.
        return error.sqlite_errorcode & PRIMARY == sqlite3.SQLITE_NOTADB
    return False


def check_writable(database: Path) -> None:
    """Raise Refusal where this user may not write a database, its write-ahead log or folder; each may be missing."""
    files = [database.with_name(f"{database.name}{suffix}") for suffix in ("", "-wal", "-shm")]
    denied = [path for path in (*files, database.parent) if os.path.exists(path) and not os.access(path, os.W_OK)]
    if denied:
        paths, own = shlex.join(map(str, denied)), denied[0].stat().st_uid == os.getuid()
        remedy = f"make it writable: chmod u+w {paths}" if own else f"sudo chown {user_name()} {paths}"
        raise Refusal(f"{denied[0]} belongs to {owner_of(denied[0])}, and this user may not write to it: {remedy}")
