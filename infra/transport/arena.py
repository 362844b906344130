"""The fast transport of one machine: one arena in shared memory, touched once and used again for every object.

No file is made and no page is cleared for a sample: that is what writing a new file costs. A small SQLite database
beside the arena says which bytes belong to which object.
"""

import mmap
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from infra.files.locks import LockHeldError, hold
from infra.records.data_path import BufferRecord, ObjectRecord
from infra.transport.base import (
    BlockSums,
    Buffer,
    TransferError,
    Transport,
    copy_hashed,
    fill,
    flat,
    wait_for_store,
)

CREATE_S = 600.0
"""Touching hundreds of gigabytes takes a while."""
ROOM_S = 60.0
"""Wait for room: the ledger's budget bounds what it knows, so only what it does not know yet can be in the way."""
POLL_S = 0.01
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


class ArenaTransport(Transport):
    """Objects in one mapped file that every process of the run shares."""

    def __init__(self, folder: Path, capacity: int, room_s: float = ROOM_S, populate: bool = True):
        """`populate`: map every page now, which takes seconds for a large arena and holds Python's lock meanwhile.

        Otherwise each page is mapped when it is first touched.
        """
        self.folder, self._room_s = folder, room_s
        with ExitStack() as opened:
            with _created(folder, capacity):
                file = opened.enter_context((folder / "arena").open("r+b"))
                self._extents, self._files = Extents(folder / "extents"), _identities(folder)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self._map = mmap.mmap(file.fileno(), 0, flags=flags)
        self._bytes = memoryview(self._map)
        self._writer = uuid.uuid4().hex
        self._alive = ExitStack()
        self._alive.enter_context(hold(self._writer_lock(self._writer)))

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write the buffers one after the other.

        Raises TransferError where room is not found within a minute, and where the arena was deleted.
        """
        self._check_that_it_is_there()
        views, nbytes = flat(buffers, key)
        self.delete(key)
        extents, start, records = self._room(key, nbytes), 0, []
        with ExitStack() as undo:
            undo.callback(self._extents.free, key, lambda _writer: False)
            for name, view in views.items():
                records.append(BufferRecord(name=name, nbytes=view.nbytes, xxh3=self._write(extents, start, view)))
                start += view.nbytes
            undo.pop_all()
        if not self._extents.finish(key):
            raise TransferError(f"{key} was deleted while it was written: its lease had expired")
        self._check_that_it_is_there()
        return ObjectRecord(key=key, location=_location(extents), buffers=tuple(records))

    def _room(self, key: str, nbytes: int) -> tuple[Extent, ...]:
        deadline = time.monotonic() + self._room_s
        while (found := self._extents.allocate(key, nbytes, self._writer)) is None:
            if time.monotonic() > deadline:
                raise TransferError(
                    f"no room for {key} ({nbytes} bytes) in the arena of {len(self._bytes)} bytes within "
                    f"{self._room_s:g} s: raise transport.budget_mib"
                )
            time.sleep(POLL_S)
        return found

    def _write(self, extents: tuple[Extent, ...], start: int, view: memoryview) -> str:
        """Copy `view` to an object's bytes from `start` on; its checksum."""
        sums = BlockSums()
        for piece in self._pieces(extents, start, view.nbytes):
            copy_hashed(piece, view[: piece.nbytes], sums)
            view = view[piece.nbytes :]
        return sums.hexdigest()

    def _pieces(self, extents: tuple[Extent, ...], start: int, nbytes: int) -> Iterator[memoryview]:
        """The memory of an object's bytes from `start` on, in their order."""
        end = start + nbytes
        for place, length in extents:
            first, last = max(start, 0), min(end, length)
            if first < last:
                yield self._bytes[place + first : place + last]
            start, end = start - length, end - length

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        extents = self._find(record)

        def read(start: int, view: memoryview) -> str:
            sums = BlockSums()
            for piece in self._pieces(extents, start, view.nbytes):
                copy_hashed(view[: piece.nbytes], piece, sums)
                view = view[piece.nbytes :]
            return sums.hexdigest()

        fill(record, into, starts, read)

    def _find(self, record: ObjectRecord) -> tuple[Extent, ...]:
        self._check_that_it_is_there()
        found = self._extents.find(record.key)
        if not found:
            raise TransferError(f"{record.key} is gone from {self.folder}")
        if sum(length for _, length in found) != record.nbytes or _location(found) != record.location:
            raise TransferError(f"{record.key} has another size than its record says ({record.nbytes} bytes)")
        return found

    def _check_that_it_is_there(self) -> None:
        # A deleted file stays mapped: a process would keep using an arena that later processes do not see.
        if _identities(self.folder) != self._files:
            raise TransferError(f"the arena in {self.folder} was deleted while it was in use; a new one is made")

    def verify(self, record: ObjectRecord) -> bool:
        """Compare the object's checksums in place."""
        try:
            extents = self._find(record)
        except TransferError:
            return False
        start = 0
        for buffer in record.buffers:
            sums = BlockSums()
            for piece in self._pieces(extents, start, buffer.nbytes):
                sums.update(piece)
            if sums.hexdigest() != buffer.xxh3:
                return False
            start += buffer.nbytes
        return True

    def delete(self, key: str) -> None:
        self._extents.free(key, self._lives)

    def _lives(self, writer: str) -> bool:
        """Whether the process that opened the arena under this name is still there."""
        try:
            with hold(self._writer_lock(writer)):
                self._writer_lock(writer).unlink()
        except LockHeldError:
            return True
        return False

    def _writer_lock(self, writer: str) -> Path:
        return self.folder / "writers" / writer

    def keys(self) -> list[str]:
        return self._extents.keys()

    def close(self) -> None:
        self._alive.close()
        self._extents.close()
        self._bytes.release()
        self._map.close()


@contextmanager
def _created(folder: Path, capacity: int) -> Iterator[None]:
    """Make the arena, every page of it in memory, unless it is there. One process does, the others wait.

    Inside, nobody replaces it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder / "lock", wait_s=CREATE_S):
        if None in _identities(folder):
            create_extents(folder / "extents", capacity)
            _allocate(folder, capacity)
        yield


def _allocate(folder: Path, capacity: int) -> None:
    aside = folder / "arena.new"
    try:
        with aside.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, capacity)
    except OSError as error:
        raise TransferError(
            f"no room for {capacity} bytes in {folder}: {error.strerror}; lower transport.budget_mib or give "
            "transport.folder a larger file system"
        ) from error
    aside.rename(folder / "arena")


def _identities(folder: Path) -> tuple[tuple[int, int] | None, ...]:
    """Device and inode of the arena and its extents; None for a missing file."""
    identities = []
    for name in ("arena", "extents"):
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            identities.append(None)
        else:
            identities.append((status.st_dev, status.st_ino))
    return tuple(identities)


def _location(where: tuple[Extent, ...]) -> str:
    return ",".join(f"{start}+{length}" for start, length in where)


def create_extents(file: Path, capacity: int) -> None:
    """Make the database of an empty arena of `capacity` bytes. One process does, before anybody opens it."""
    for remains in file.parent.glob(f"{file.name}*"):
        remains.unlink()
    connection = sqlite3.connect(file)
    connection.executescript(TABLES)
    with connection:
        connection.execute("INSERT INTO extents VALUES (0, ?, NULL)", (capacity,))
    connection.close()


class Extents:
    """Which bytes of an arena belong to which object: one process's view, shared by its threads.

    An object may lie in several pieces, so whatever fits into the free bytes fits: an arena has no fragmentation to
    fear. A process killed in the middle of a change leaves the database as it was before.
    """

    def __init__(self, file: Path):
        self._file = file
        self._connection = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        # Killed processes lose nothing, and reboots lose the arena.
        self._connection.execute("PRAGMA synchronous = OFF")
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
