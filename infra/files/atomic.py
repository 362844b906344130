"""Files that are never read half-written: written to a temporary file, fsynced, renamed."""

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel


def write_atomically(path: Path, data: bytes | str | BaseModel, mode: int = 0o666) -> None:
    """Write `data` to `path` so that a reader sees the old file or the whole new one; `mode` is less the umask."""
    if isinstance(data, BaseModel):
        data = data.model_dump_json(indent=2) + "\n"
    if isinstance(data, str):
        data = data.encode()
    with replacing(path, mode) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """What is written here takes the place of `path` at the end, whole; after an error, nothing does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with ExitStack() as undo:
        undo.callback(aside.unlink, missing_ok=True)
        with open(aside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        undo.pop_all()
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some FUSE and SMB file systems cannot
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of a file that somebody else wrote durable."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
