"""Looks at SQLite files through SQLite alone.

Closing a file drops all locks that this process has on it, also those of a connection that is still open.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

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
