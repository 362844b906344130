"""Objects as files: streamed through one folder of this machine, or kept for good in a folder or on S3."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from pydantic import ValidationError

from infra.files.atomic import replacing
from infra.files.folders import make_folder
from infra.records.data_path import BufferRecord, ObjectRecord
from infra.refusal import Refusal
from infra.transport.base import (
    WAIT_S,
    Buffer,
    Read,
    TransferError,
    Transport,
    block_sums,
    fill,
    flat,
    is_full,
    wait_for_room,
    wait_for_store,
)

RECORD = ".json"
PARTIAL = ".tmp"
ABANDONED_S = 86_400.0
"""A partial file of this age is a killed writer's."""
PROBE, CHECK_S = "draftsmith-writable", 5.0
"""Name of an object that is written to try a store, and how long a store that does not answer is waited for."""
LASTING = (FileNotFoundError, PermissionError)
"""Errors of a server that answers."""
Result = TypeVar("Result")


class FileTransport(Transport):
    """Objects as files in one folder that every process of the run sees, in shared memory where there is room.

    It is the specification and the test double of the faster ones: exact sizes, xxh3 checksums, whole files only.
    """

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
        return _record(key, path.name, views)

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        try:
            with (self.folder / record.location).open("rb") as file:
                if os.fstat(file.fileno()).st_size != record.nbytes:
                    raise TransferError(f"{record.key} has another size than its record says ({record.nbytes} bytes)")
                fill(record, into, starts, _reader(file, record))
        except FileNotFoundError as error:
            raise TransferError(f"{record.key} is gone from {self.folder}") from error

    def delete(self, key: str) -> None:
        for path in (self._path(key), _aside(self._path(key))):
            path.unlink(missing_ok=True)

    def keys(self) -> Iterator[str]:
        """Also of files that were never finished: a killed writer's hold memory until they are swept."""
        for path in self.folder.iterdir():
            yield path.name.removeprefix(".").removesuffix(PARTIAL).replace("+", "/")

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "+")


def _aside(path: Path) -> Path:
    """Where an object is written until it is whole."""
    return path.with_name(f".{path.name}{PARTIAL}")


def _write(path: Path, views: list[memoryview], nbytes: int) -> None:
    aside = _aside(path)
    try:
        with aside.open("wb") as file:
            # Room is taken before the first byte, so a full tmpfs is an error here and never a torn object.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            file.writelines(views)
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _record(key: str, location: str, views: Mapping[str, memoryview]) -> ObjectRecord:
    buffers = tuple(BufferRecord(name=n, nbytes=v.nbytes, xxh3=block_sums(v)) for n, v in views.items())
    return ObjectRecord(key=key, location=location, buffers=buffers)


def _reader(file: Any, record: ObjectRecord) -> Read:
    """Reads an object from an open file."""

    def read(start: int, view: memoryview) -> str:
        file.seek(start)
        if file.readinto(view) != view.nbytes:
            raise TransferError(f"{record.key} has another size than its record says")
        return block_sums(view)

    return read


class StoredTransport(Transport):
    """The offline mode: hidden states are kept, in a folder or on S3, and captured once, where a recipe asks for it.

    Objects are named by their content, so other epochs and other runs find them. Nothing is ever deleted: that is a
    person's decision.
    """

    def __init__(self, url: str, wait_s: float = WAIT_S):
        """`wait_s`: how long a full folder, or a server that does not answer, is waited for."""
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._wait_s = wait_s
        if self._is_local:  # an object store has no folders, and a mistyped bucket should not come into being
            self._reach(lambda: self._files.makedirs(self._root, exist_ok=True))

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write the buffers, then the record, which makes the object visible."""
        views, _ = flat(buffers, key)
        record = _record(key, key, views)
        try:
            self._write(self._path(key), [*views.values()])
            self._write(self._path(key + RECORD), [memoryview(record.model_dump_json().encode())])
        except OSError as error:
            raise TransferError(f"cannot write {key} to {self._root}: {error}") from error
        return record

    def _write(self, path: str, views: list[memoryview]) -> None:
        """Whole or not at all: a local file is renamed when it is durable, an S3 object appears at its end."""
        if self._is_local:
            nbytes = sum(view.nbytes for view in views)
            wait_for_room(lambda: _write_durably(Path(path), views), self._root, nbytes, self._wait_s)
        else:
            self._reach(lambda: self._upload(path, views))

    def _upload(self, path: str, views: list[memoryview]) -> None:
        with self._files.open(path, "wb") as file:
            for view in views:
                file.write(view)

    def find(self, key: str) -> ObjectRecord | None:
        """The record of an object that was put before and is whole.

        None where the record or the object is missing, torn or changed: `put` replaces both.
        """
        try:
            record = ObjectRecord.model_validate_json(
                self._reach(lambda: self._files.cat_file(self._path(key + RECORD)))
            )
        except (FileNotFoundError, ValidationError):
            return None
        return record if record.location == key and self.verify(record) else None

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        try:
            self._reach(lambda: self._read(record, into, starts))
        except FileNotFoundError as error:
            raise TransferError(f"{record.key} is gone from {self._root}") from error

    def _read(self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None) -> None:
        with self._files.open(self._path(record.location), "rb") as file:
            fill(record, into, starts, _reader(file, record))

    def _reach(self, call: Callable[[], Result]) -> Result:
        """Repeat `call` while the server does not answer. Raises FileNotFoundError, StoreUnavailableError."""
        if self._is_local:
            return wait_for_store(call, is_full, f"{self._root} is full", self._wait_s)
        from botocore.exceptions import BotoCoreError  # s3fs lets these through

        reason = f"{self._root} does not answer: check the object store, the network and $AWS_ENDPOINT_URL"
        errors = (OSError, BotoCoreError)
        return wait_for_store(call, lambda e: not isinstance(e, LASTING), reason, self._wait_s, errors)

    def delete(self, key: str) -> None:
        """Kept."""

    def keys(self) -> Iterator[str]:
        """Empty: a sweeper may remove nothing."""
        return iter(())

    @property
    def _is_local(self) -> bool:
        return "file" in self._files.protocol

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _write_durably(path: Path, views: list[memoryview]) -> None:
    with replacing(path) as file:
        file.writelines(views)


def local_folder(url: str) -> Path | None:
    """The local folder of a URL, or None."""
    files, root = fsspec.core.url_to_fs(url)
    return Path(root) if "file" in files.protocol else None


def check_space(where: str, tokens: int, bytes_per_token: int) -> None:
    """Raise Refusal if hidden states of `tokens` tokens do not fit into a folder of this machine, or if an object
    store takes nothing from this user."""
    folder = local_folder(where)
    if folder is None:
        _check_object_store(where)
        return
    make_folder(folder)
    needed = tokens * bytes_per_token
    there, free = _kept_bytes(folder), shutil.disk_usage(folder).free
    if free + there < needed:
        raise Refusal(
            f"transport.kind=stored: {tokens:,} tokens x {bytes_per_token} bytes are {needed / 2**30:.1f} GiB of "
            f"hidden states, and {folder} has {free / 2**30:.1f} GiB free: stream them (transport.kind=auto), lower "
            "data.max_samples, or name another transport.folder"
        )


def _kept_bytes(folder: Path) -> int:
    """Bytes of a folder's files. What a killed writer left long ago is removed."""
    kept = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError, PermissionError):  # another run has just finished it, or it is another user's
            status = file.stat()
            if file.match(f".*{PARTIAL}") and time.time() - status.st_mtime > ABANDONED_S:
                file.unlink()
            else:
                kept += status.st_size
    return kept


def _check_object_store(url: str) -> None:
    """A small object is written, and stays: not everybody who may write may delete."""
    from botocore.exceptions import BotoCoreError

    try:
        StoredTransport(url, CHECK_S).put(PROBE, {"probe": b"1"})
    except (OSError, ValueError, TransferError, BotoCoreError) as error:  # ValueError: a name that no bucket may have
        raise Refusal(
            f"transport.folder: {url} takes no objects ({error}): check the bucket, the right to write, and "
            "$AWS_ENDPOINT_URL with its credentials"
        ) from error
