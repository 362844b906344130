"""Which bytes of an arena belong to which object: a small SQLite database beside it.

An object may lie in several pieces, so whatever fits into the free bytes fits: an arena has no fragmentation to fear.
A process killed in the middle of a change leaves the database as it was before.
"""

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from infra.transport.waiting import wait_for_store

BUSY_TIMEOUT_S = 60.0
TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE objects (key TEXT PRIMARY KEY, writer TEXT, doomed INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE extents (start INTEGER PRIMARY KEY, length INTEGER NOT NULL, key TEXT);
CREATE INDEX extents_by_key ON extents (key);
CREATE INDEX free_extents ON extents (start, length) WHERE key IS NULL;
"""

Result = TypeVar("Result")
Extent = tuple[int, int]
"""Start and length, in bytes."""


def create(file: Path, capacity: int) -> None:
    """Make the database of an empty arena of `capacity` bytes. One process does, before anybody opens it."""
    for remains in file.parent.glob(f"{file.name}*"):
        remains.unlink()
    connection = sqlite3.connect(file)
    connection.executescript(TABLES)
    with connection:
        connection.execute("INSERT INTO extents VALUES (0, ?, NULL)", (capacity,))
    connection.close()


class Extents:
    """One process's view; its threads share it."""

    def __init__(self, file: Path):
        self._file = file
        self._connection = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        self._connection.execute(
            "PRAGMA synchronous = OFF"
        )  # killed processes lose nothing, and reboots lose the arena
        self._lock = threading.Lock()

    def allocate(self, key: str, nbytes: int, writer: str) -> tuple[Extent, ...] | None:
        """Give free bytes to an object that `writer` is about to write; None if there are too few."""

        def allocate(connection: sqlite3.Connection) -> tuple[Extent, ...] | None:
            taken: list[Extent] = []
            wanted = nbytes
            for start, length in connection.execute(
                "SELECT start, length FROM extents WHERE key IS NULL ORDER BY start"
            ):
                taken.append((start, min(length, wanted)))
                wanted -= taken[-1][1]
                if wanted == 0:
                    break
            if wanted:
                return None
            connection.execute("INSERT INTO objects (key, writer) VALUES (?, ?)", (key, writer))
            for start, length in taken:
                self._take(connection, key, start, length)
            return tuple(taken)

        return self._change(allocate)

    def _take(self, connection: sqlite3.Connection, key: str, start: int, length: int) -> None:
        (whole,) = connection.execute("SELECT length FROM extents WHERE start = ?", (start,)).fetchone()
        connection.execute("UPDATE extents SET length = ?, key = ? WHERE start = ?", (length, key, start))
        if whole > length:
            connection.execute("INSERT INTO extents VALUES (?, ?, NULL)", (start + length, whole - length))

    def finish(self, key: str) -> bool:
        """Mark the object as written. False if it was deleted meanwhile: its bytes are free now."""

        def finish(connection: sqlite3.Connection) -> bool:
            (doomed,) = connection.execute("SELECT doomed FROM objects WHERE key = ?", (key,)).fetchone()
            if doomed:
                self._free(connection, key)
            else:
                connection.execute("UPDATE objects SET writer = NULL WHERE key = ?", (key,))
            return not doomed

        return self._change(finish)

    def find(self, key: str) -> tuple[Extent, ...]:
        """The place of a whole object; empty if there is none."""
        with self._lock:
            return tuple(
                self._connection.execute(
                    "SELECT start, length FROM extents JOIN objects USING (key) "
                    "WHERE key = ? AND writer IS NULL ORDER BY start",
                    (key,),
                )
            )

    def free(self, key: str, lives: Callable[[str], bool]) -> None:
        """Delete an object. One that a living writer still writes is deleted when it has finished."""

        def free(connection: sqlite3.Connection) -> None:
            found = connection.execute("SELECT writer FROM objects WHERE key = ?", (key,)).fetchone()
            if found and found[0] is not None and lives(found[0]):
                connection.execute("UPDATE objects SET doomed = 1 WHERE key = ?", (key,))
            elif found:
                self._free(connection, key)

        self._change(free)

    def _free(self, connection: sqlite3.Connection, key: str) -> None:
        """Give the bytes back, joined with free neighbours."""
        connection.execute("DELETE FROM objects WHERE key = ?", (key,))
        for start, length in connection.execute("SELECT start, length FROM extents WHERE key = ?", (key,)).fetchall():
            connection.execute("DELETE FROM extents WHERE start = ?", (start,))
            before = connection.execute(
                "SELECT start, length FROM extents WHERE key IS NULL AND start < ? ORDER BY start DESC LIMIT 1",
                (start,),
            ).fetchone()
            after = connection.execute(
                "SELECT start, length FROM extents WHERE key IS NULL AND start = ?", (start + length,)
            ).fetchone()
            first, end = start, start + length
            if before and sum(before) == start:
                first = before[0]
            if after:
                end = sum(after)
            connection.execute("DELETE FROM extents WHERE start >= ? AND start < ?", (first, end))
            connection.execute("INSERT INTO extents VALUES (?, ?, NULL)", (first, end - first))

    def keys(self) -> list[str]:
        """Keys of all objects, those being written too."""
        with self._lock:
            return [key for (key,) in self._connection.execute("SELECT key FROM objects")]

    def close(self) -> None:
        self._connection.close()

    def _change(self, change: Callable[[sqlite3.Connection], Result]) -> Result:
        """Make a change in one transaction, again and again while the file system has no room for it.

        Raises StoreUnavailableError.
        """
        reason = f"no room for the arena's table, the file system of {self._file.parent} is full: free space there"
        return wait_for_store(lambda: self._once(change), _is_full, reason, errors=(sqlite3.OperationalError,))

    def _once(self, change: Callable[[sqlite3.Connection], Result]) -> Result:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or rolls back
                return change(self._connection)


def _is_full(error: Exception) -> bool:
    """SQLite reports a full shared index as IOERR, a full log as FULL."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return primary in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
