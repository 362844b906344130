"""The contract of a transport: it moves named buffers and verifies them. It knows no tensors."""

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from infra.records.data_path import BufferRecord, ObjectRecord
from infra.waiting import wait_while

CHUNK = 256 * 2**10
"""Bytes copied, then hashed: they fit into the second-level cache."""

BLOCK = 4 * 2**20
"""Bytes per checksum. A reader of a part of a buffer reads and verifies whole blocks."""

SUM = 32
"""Digits of a checksum."""

WAIT_S = 60.0
"""Time for a person or a clean-up to free space. A process that gives up is started again and waits again."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
CANARY = "/canary/"
"""Part of the keys of objects that are written, read and deleted as a test."""
READER = "@"
"""Between the key of an object to put and the number of the machine that will probably read it."""

Buffer = memoryview | bytearray | bytes
Read = Callable[[int, memoryview], str]
"""Fill memory with an object's bytes from this place on; the checksum of what arrived."""
Result = TypeVar("Result")


class TransferError(Exception):
    """An object is missing, short, or does not match its checksum."""


class StoreUnavailableError(TransferError):
    """The store has no room or does not answer. This says nothing about the objects in it."""


class Transport(ABC):
    """Moves one object (the named buffers of one sample) from a generator to a trainer."""

    @abstractmethod
    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write an object; it is whole and readable once this returns.

        Where the store has parts on several machines, `key` may end in `@N`: machine N will probably read it.
        A full store, or one that does not answer, is waited for. Raises StoreUnavailableError when that takes too
        long, TransferError for any other reason.
        """

    @abstractmethod
    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        """Copy an object's buffers into `into` (same names, exact sizes) and verify them.

        With `starts` of those buffers of which a part is wanted, as many bytes of each as `into` has, from there on;
        of the object only the blocks that hold them are read, and verified.

        Raises TransferError when the object is missing, has other sizes, or fails a checksum, and
        StoreUnavailableError when the store does not answer.
        """

    def verify(self, record: ObjectRecord) -> bool:
        """Whether the object is there, whole and unchanged. Raises StoreUnavailableError."""
        try:
            self.get(record, {buffer.name: memoryview(bytearray(buffer.nbytes)) for buffer in record.buffers})
        except StoreUnavailableError:
            raise
        except TransferError:
            return False
        return True

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object; deleting what is not there is fine."""

    @abstractmethod
    def keys(self) -> Iterable[str]:
        """Keys of all objects present, for the sweeper."""

    def close(self) -> None:  # noqa: B027
        """Release this process's handles (the objects stay). Idempotent."""


class BlockSums:
    """The checksums of a buffer's blocks, whose bytes come in any portions."""

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._open = xxhash.xxh3_128()
        self._left = BLOCK

    def update(self, view: memoryview) -> None:
        while view.nbytes:
            part = view[: self._left]
            self._open.update(part)
            self._left -= part.nbytes
            if not self._left:
                self._close()
            view = view[part.nbytes :]

    def _close(self) -> None:
        self._closed.append(self._open.hexdigest())
        self._open.reset()
        self._left = BLOCK

    def hexdigest(self) -> str:
        """Concatenated checksums; for an empty buffer the checksum of no bytes."""
        if self._left < BLOCK or not self._closed:
            self._close()
        return "".join(self._closed)


def block_sums(view: memoryview) -> str:
    """Checksums of a buffer's blocks, in order."""
    sums = BlockSums()
    sums.update(view)
    return sums.hexdigest()


def copy_hashed(into: memoryview, source: memoryview, sums: BlockSums) -> None:
    """Copy `source` to `into`, of the same size, and add what arrived to the checksums."""
    for at in range(0, source.nbytes, CHUNK):
        arrived = into[at : at + CHUNK]
        arrived[:] = source[at : at + CHUNK]
        sums.update(arrived)


def flat(buffers: Mapping[str, Buffer], key: str) -> tuple[dict[str, memoryview], int]:
    """The buffers as bytes, and how many there are; keys leave `+`, `#` and `@` to the transports' own names."""
    assert not {"+", "#", READER} & set(key), key
    views = {name: memoryview(buffer).cast("B") for name, buffer in buffers.items()}
    nbytes = sum(view.nbytes for view in views.values())
    assert nbytes, f"{key} is empty"
    return views, nbytes


@dataclass(frozen=True)
class Block:
    """A block of a buffer, and what of it is wanted."""

    buffer: BufferRecord
    xxh3: str
    start: int
    """Offset in the object."""
    nbytes: int
    skipped: int
    """Bytes before the wanted ones."""
    into: memoryview
    """Destination of the wanted bytes."""


def blocks(
    record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
) -> Iterator[Block]:
    """The blocks that contain the requested bytes, in their order. Raises TransferError for other sizes."""
    offset = 0
    for buffer in record.buffers:
        if starts is None or buffer.name in starts:
            view, start = into[buffer.name].cast("B"), starts[buffer.name] if starts else 0
            end = start + view.nbytes
            if end > buffer.nbytes or (starts is None and end < buffer.nbytes):
                raise TransferError(f"{record.key}: {buffer.name} is {buffer.nbytes} bytes, expected {end}")
            for first in range(start - start % BLOCK, end, BLOCK):
                nbytes, skipped = min(BLOCK, buffer.nbytes - first), max(0, start - first)
                wanted = view[first + skipped - start : first + nbytes - start]
                number = first // BLOCK * SUM
                yield Block(buffer, buffer.xxh3[number : number + SUM], offset + first, nbytes, skipped, wanted)
        offset += buffer.nbytes


def fill(record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None, read: Read) -> None:
    """Read the requested bytes by whole blocks in their order, each verified (see `Transport.get`)."""
    for block in blocks(record, into, starts):
        whole = block.into.nbytes == block.nbytes
        arrived = block.into if whole else memoryview(bytearray(block.nbytes))
        check_sum(record, block.buffer, read(block.start, arrived), block.xxh3)
        if not whole:
            block.into[:] = arrived[block.skipped : block.skipped + block.into.nbytes]


def check_sum(record: ObjectRecord, buffer: BufferRecord, found: str, expected: str) -> None:
    """Raise TransferError where the bytes that arrived have another checksum than those that were put."""
    if found != expected:
        raise TransferError(f"{record.key}: checksum of {buffer.name} does not match")


def wait_for_store(
    call: Callable[[], Result],
    passes: Callable[[Exception], bool],
    reason: str,
    wait_s: float = WAIT_S,
    errors: tuple[type[Exception], ...] = (OSError,),
) -> Result:
    """Repeat `call` while it raises one of `errors` that `passes`; what it returns. The reason is printed once.

    Raises StoreUnavailableError, with the reason, after `wait_s` seconds.
    """
    try:
        return wait_while(passes, call, reason, wait_s, errors)
    except errors as error:
        if not passes(error):
            raise
        raise StoreUnavailableError(f"{reason} (waited {wait_s:g} s; the last error is: {error})") from error


def wait_for_room(write: Callable[[], Result], folder: Path | str, nbytes: int, wait_s: float = WAIT_S) -> Result:
    """Call `write` until the file system of `folder` has room for its `nbytes`; what it returns.

    Raises StoreUnavailableError where it stays full for `wait_s` seconds. Other errors are raised at once.
    """
    reason = (
        f"no room for {nbytes} bytes, the file system of {folder} is full: free space there, lower "
        "transport.budget_mib, or set transport.folder to a larger file system"
    )
    return wait_for_store(write, is_full, reason, wait_s)


def is_full(error: Exception) -> bool:
    """Whether a file system had no room."""
    return isinstance(error, OSError) and error.errno in FULL
