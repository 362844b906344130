"""Looks at SQLite files through SQLite: to close a file that is open elsewhere in this process would drop its locks."""

import sqlite3
from contextlib import closing
from pathlib import Path

PRIMARY = 0xFF
"""Bits of SQLite's error codes that name the error; the others say more about it."""


def is_other_file(file: Path) -> bool:
    """Whether a file that is there holds something, and no SQLite database."""
    try:
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.DatabaseError as error:
        # Locked, full or damaged further on is not for this question.
        return error.sqlite_errorcode & PRIMARY == sqlite3.SQLITE_NOTADB
    return False
