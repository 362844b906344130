"""Detects a damaged SQLite file before anything opens the ledger."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

BUSY_TIMEOUT_S = 60
LOOKS_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
PRIMARY = 0xFF
"""Bits of SQLite's error codes that name the error; the others say more about it."""


def set_aside_if_damaged(file: Path) -> Path | None:
    """Rename a damaged ledger, with its write-ahead log; its new name, or None for a whole or missing one.

    The trainer then finds an empty ledger and rebuilds it from the newest checkpoint. A damaged file that is read on
    could give wrong answers: SQLite notices damage only where it happens to look.
    """
    if not file.is_file() or _is_whole(file):
        return None
    aside = file.with_name(f"{file.name}.damaged-{time.time_ns()}")
    # The file first: without it, its log means nothing.
    for suffix in ("", "-wal", "-shm"):
        part = file.with_name(file.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def _is_whole(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)) as connection:
            return connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & PRIMARY in LOOKS_DAMAGED:
            return False
        raise
