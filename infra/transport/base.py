"""The contract of a transport: it moves named buffers and verifies them. It knows no tensors."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from infra.records import BufferRecord, ObjectRecord

Buffer = memoryview | bytearray | bytes


class TransferError(Exception):
    """An object is missing, short, or does not match its checksum."""


def flat(buffers: Mapping[str, Buffer], key: str) -> tuple[dict[str, memoryview], int]:
    """The buffers as bytes, and how many there are; keys leave `+` and `#` to the transports' own names."""
    assert not {"+", "#"} & set(key), key
    views = {name: memoryview(buffer).cast("B") for name, buffer in buffers.items()}
    nbytes = sum(view.nbytes for view in views.values())
    assert nbytes, f"{key} is empty"
    return views, nbytes


def target(record: ObjectRecord, buffer: BufferRecord, into: Mapping[str, memoryview]) -> memoryview:
    """Where a buffer goes, as bytes. Raises TransferError where another size is expected."""
    view = into[buffer.name].cast("B")
    if view.nbytes != buffer.nbytes:
        raise TransferError(f"{record.key}: {buffer.name} is {buffer.nbytes} bytes, expected {view.nbytes}")
    return view


def check_sum(record: ObjectRecord, buffer: BufferRecord, found: str) -> None:
    """Raise TransferError where the bytes that arrived have another checksum than those that were put."""
    if found != buffer.xxh3:
        raise TransferError(f"{record.key}: checksum of {buffer.name} does not match")


def reads_back(transport: "Transport", record: ObjectRecord) -> bool:
    """Whether an object is whole, found by reading it into memory of its own."""
    try:
        transport.get(record, {buffer.name: memoryview(bytearray(buffer.nbytes)) for buffer in record.buffers})
    except TransferError:
        return False
    return True


class Transport(Protocol):
    """Moves one object (the named buffers of one sample) from a generator to a trainer."""

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write an object; it is whole and readable once this returns. Raises TransferError when it cannot."""
        ...

    def get(self, record: ObjectRecord, into: Mapping[str, memoryview]) -> None:
        """Copy an object's buffers into `into` (same names, exact sizes) and verify them.

        Raises TransferError when the object is missing, has other sizes, or fails its checksum.
        """
        ...

    def verify(self, record: ObjectRecord) -> bool:
        """Whether the object is there, whole and unchanged."""
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
