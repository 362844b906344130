"""The plain transport: one file per object in shared memory.

It is the specification and the test double of the faster ones: exact sizes, xxh3 checksums, whole files only.
"""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from infra.records.data_path import BufferRecord, ObjectRecord
from infra.transport.base import Buffer, TransferError, fill, flat, reads_back
from infra.transport.copying import block_sums
from infra.transport.waiting import WAIT_S, wait_for_room


class FileTransport:
    """Objects as files in one folder that every process of the run sees."""

    def __init__(self, folder: Path, wait_s: float = WAIT_S):
        """`wait_s`: how long a writer waits for room on a full file system."""
        self.folder, self._wait_s = folder, wait_s
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write the buffers; the file appears under its name only when it is whole."""
        views, nbytes = flat(buffers, key)
        path = self._path(key)
        try:
            wait_for_room(lambda: _write(path, [*views.values()], nbytes), self.folder, nbytes, self._wait_s)
        except OSError as error:
            raise TransferError(
                f"cannot write {key} to {self.folder}: {error.strerror}; lower transport.budget_mib or give "
                "transport.folder a larger file system"
            ) from error
        records = tuple(BufferRecord(name=n, nbytes=v.nbytes, xxh3=block_sums(v)) for n, v in views.items())
        return ObjectRecord(key=key, location=path.name, buffers=records)

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        """Copy the object, or parts of it, into `into` and verify sizes and checksums."""
        try:
            with (self.folder / record.location).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != record.nbytes:
                    raise TransferError(f"{record.key} has another size than its record says ({record.nbytes} bytes)")
                fill(record, into, starts, partial(_read_at, file.fileno(), record.key))
        except FileNotFoundError as error:
            raise TransferError(f"{record.key} is gone from {self.folder}") from error

    def verify(self, record: ObjectRecord) -> bool:
        """Read the object back and compare its checksums."""
        return reads_back(self, record)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def keys(self) -> Iterator[str]:
        for path in self.folder.iterdir():
            if not path.name.startswith("."):
                yield path.name.replace("+", "/")

    def close(self) -> None:
        """Nothing is held between calls."""

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "+")


def _write(path: Path, views: list[memoryview], nbytes: int) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb", buffering=0) as file:
            # Room is taken before the first byte, so a full tmpfs is an error here and never a torn object.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            for view in views:
                _write_all(file.fileno(), view)
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _read_at(descriptor: int, key: str, start: int, view: memoryview) -> str:
    left = view
    while left.nbytes:
        count = os.preadv(descriptor, [left], start + view.nbytes - left.nbytes)
        if count == 0:
            raise TransferError(f"{key} is shorter than its record says")
        left = left[count:]
    return block_sums(view)
