"""The offline mode: hidden states are kept, in a folder or on S3, and captured once. Only where a recipe asks for it.

Runs in generators and trainer ranks. Objects are named by their content, so other epochs and other runs find them.
"""

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import fsspec

from infra.records import BufferRecord, ObjectRecord
from infra.transport.base import Buffer, TransferError, fill, flat, reads_back
from infra.transport.copying import block_sums

RECORD = ".json"


class StoredTransport:
    """Nothing is ever deleted: that is a person's decision."""

    def __init__(self, url: str):
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._files.makedirs(self._root, exist_ok=True)

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write the buffers one after the other, then the record: without it there is no object."""
        views, _ = flat(buffers, key)
        records = tuple(BufferRecord(name=n, nbytes=v.nbytes, xxh3=block_sums(v)) for n, v in views.items())
        record = ObjectRecord(key=key, location=key, buffers=records)
        try:
            self._write(self._path(key), [*views.values()])
            self._write(self._path(key + RECORD), [memoryview(record.model_dump_json().encode())])
        except OSError as error:
            raise TransferError(f"cannot write {key} to {self._root}: {error}") from error
        return record

    def _write(self, path: str, views: list[memoryview]) -> None:
        """Whole or not at all: a local file is renamed, an S3 object appears at its end."""
        aside = f"{path}.{uuid.uuid4().hex}" if self._is_local else path
        with self._files.open(aside, "wb") as file:
            for view in views:
                file.write(view)
        if self._is_local:
            os.replace(aside, path)

    def find(self, key: str) -> ObjectRecord | None:
        """The record of an object that was put before and is whole."""
        try:
            record = ObjectRecord.model_validate_json(self._files.cat_file(self._path(key + RECORD)))
        except FileNotFoundError:
            return None
        return record if self.verify(record) else None

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        """Read the object, or parts of it, into `into` and verify sizes and checksums."""
        try:
            with self._files.open(self._path(record.location), "rb") as file:

                def read(start: int, view: memoryview) -> str:
                    file.seek(start)
                    if file.readinto(view) != view.nbytes:
                        raise TransferError(f"{record.key} has another size than its record says")
                    return block_sums(view)

                fill(record, into, starts, read)
        except FileNotFoundError as error:
            raise TransferError(f"{record.key} is gone from {self._root}") from error

    def verify(self, record: ObjectRecord) -> bool:
        """Read the object back and compare its checksums."""
        return reads_back(self, record)

    def delete(self, key: str) -> None:
        """Kept."""

    def keys(self) -> Iterator[str]:
        """None that a sweeper may remove."""
        return iter(())

    def close(self) -> None:
        """Nothing is held between calls."""

    @property
    def _is_local(self) -> bool:
        return "file" in self._files.protocol

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def local_folder(url: str) -> Path | None:
    """The folder that a URL names on this machine's disks, if it does."""
    files, root = fsspec.core.url_to_fs(url)
    return Path(root) if "file" in files.protocol else None
