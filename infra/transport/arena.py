"""The fast transport of one machine: one arena in shared memory, touched once and used again for every object.

No file is made and no page is cleared for a sample: that is what writing a new
file costs.
"""

import mmap
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infra.files.locks import LockHeldError, hold
from infra.records.data_path import BufferRecord, ObjectRecord
from infra.transport import extents
from infra.transport.base import Buffer, TransferError, fill, flat
from infra.transport.copying import BlockSums, copy_hashed
from infra.transport.extents import Extent, Extents

CREATE_S = 600.0
"""Touching hundreds of gigabytes takes a while."""
ROOM_S = 60.0
"""Wait for room: the ledger's budget bounds what it knows, so only what it does not know yet can be in the way."""
POLL_S = 0.01


class ArenaTransport:
    """Objects in one mapped file that every process of the run shares."""

    def __init__(self, folder: Path, capacity: int, room_s: float = ROOM_S):
        self.folder, self._room_s = folder, room_s
        with ExitStack() as opened:
            with _created(folder, capacity):
                file = opened.enter_context((folder / "arena").open("r+b"))
                self._extents, self._files = Extents(folder / "extents"), _identities(folder)
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
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
        place = _ObjectPlace(self._bytes, self._room(key, nbytes))
        with ExitStack() as undo:
            undo.callback(self._extents.free, key, lambda _writer: False)
            records = tuple(BufferRecord(name=n, nbytes=v.nbytes, xxh3=place.write(v)) for n, v in views.items())
            undo.pop_all()
        if not self._extents.finish(key):
            raise TransferError(f"{key} was deleted while it was written: its lease had expired")
        self._check_that_it_is_there()
        return ObjectRecord(key=key, location=_location(place.extents), buffers=records)

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

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        """Copy the object, or parts of it, into `into` and verify sizes and checksums."""
        fill(record, into, starts, _ObjectPlace(self._bytes, self._find(record)).read)

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
            place = _ObjectPlace(self._bytes, self._find(record))
        except TransferError:
            return False
        return all(place.hash(buffer.nbytes) == buffer.xxh3 for buffer in record.buffers)

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

    def keys(self) -> Iterator[str]:
        yield from self._extents.keys()

    def close(self) -> None:
        """Give the mapping back. Idempotent."""
        self._alive.close()
        self._extents.close()
        self._bytes.release()
        self._map.close()


class _ObjectPlace:
    """An object's extents, read or written from the first byte on."""

    def __init__(self, arena: memoryview, where: tuple[Extent, ...]):
        self.extents = where
        self._pieces = [arena[start : start + length] for start, length in where]
        self._at = 0

    def write(self, view: memoryview) -> str:
        """Copy `view` to the next bytes; its checksum."""
        sums = BlockSums()
        for piece in self._next(view.nbytes):
            copy_hashed(piece, view[: piece.nbytes], sums)
            view = view[piece.nbytes :]
        return sums.hexdigest()

    def read(self, start: int, view: memoryview) -> str:
        """Copy bytes to `view`, from `start` on, which is not before where the last ones ended; their checksum, taken
        from the copy."""
        for _ in self._next(start - self._at):
            pass
        sums = BlockSums()
        for piece in self._next(view.nbytes):
            copy_hashed(view[: piece.nbytes], piece, sums)
            view = view[piece.nbytes :]
        return sums.hexdigest()

    def hash(self, nbytes: int) -> str:
        """Checksum of the next bytes."""
        sums = BlockSums()
        for piece in self._next(nbytes):
            sums.update(piece)
        return sums.hexdigest()

    def _next(self, nbytes: int) -> Iterator[memoryview]:
        self._at += nbytes
        while nbytes:
            piece = self._pieces.pop(0)
            if piece.nbytes > nbytes:
                self._pieces.insert(0, piece[nbytes:])
                piece = piece[:nbytes]
            nbytes -= piece.nbytes
            yield piece


@contextmanager
def _created(folder: Path, capacity: int) -> Iterator[None]:
    """Make the arena, every page of it in memory, unless it is there. One process does, the others wait.

    Inside, nobody replaces it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder / "lock", wait_s=CREATE_S):
        if None in _identities(folder):
            extents.create(folder / "extents", capacity)
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
