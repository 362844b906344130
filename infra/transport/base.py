"""The contract of a transport: it moves named buffers and verifies them. It knows no tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from infra.records.data_path import BufferRecord, ObjectRecord
from infra.transport.copying import BLOCK, SUM

Buffer = memoryview | bytearray | bytes
Read = Callable[[int, memoryview], str]
"""Fill memory with an object's bytes from this place on; the checksum of what arrived."""


class TransferError(Exception):
    """An object is missing, short, or does not match its checksum."""


class StoreUnavailableError(TransferError):
    """The store has no room or does not answer. This says nothing about the objects in it."""


def flat(buffers: Mapping[str, Buffer], key: str) -> tuple[dict[str, memoryview], int]:
    """The buffers as bytes, and how many there are; keys leave `+` and `#` to the transports' own names."""
    assert not {"+", "#"} & set(key), key
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


def reads_back(transport: "Transport", record: ObjectRecord) -> bool:
    """Whether an object is whole, by reading it into memory. Raises StoreUnavailableError."""
    try:
        transport.get(record, {buffer.name: memoryview(bytearray(buffer.nbytes)) for buffer in record.buffers})
    except StoreUnavailableError:
        raise
    except TransferError:
        return False
    return True


class Transport(Protocol):
    """Moves one object (the named buffers of one sample) from a generator to a trainer."""

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write an object; it is whole and readable once this returns.

        A full store, or one that does not answer, is waited for. Raises StoreUnavailableError when that takes too
        long, TransferError for any other reason.
        """
        ...

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        """Copy an object's buffers into `into` (same names, exact sizes) and verify them.

        With `starts` of those buffers of which a part is wanted, as many bytes of each as `into` has, from there on;
        of the object only the blocks that hold them are read, and verified.

        Raises TransferError when the object is missing, has other sizes, or fails a checksum, and
        StoreUnavailableError when the store does not answer.
        """
        ...

    def verify(self, record: ObjectRecord) -> bool:
        """Whether the object is there, whole and unchanged. Raises StoreUnavailableError."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; deleting what is not there is fine."""
        ...

    def keys(self) -> Iterable[str]:
        """Keys of all objects present, for the sweeper."""
        ...

    def close(self) -> None:
        """Release this process's handles (the objects stay)."""
        ...
