"""Kinds of source files, told by their names, and how compressed ones are opened."""

import bz2
import gzip
import io
import lzma
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

FORMATS = (".parquet", ".jsonl", ".json", ".txt")
"""Of a folder only files of the first format that it contains are read; the others usually describe them."""
BUFFER_BYTES = 2**18
"""Of a compressed file, decompressed at once."""
_SPELLINGS = {".ndjson": ".jsonl"}


class FileKind(NamedTuple):
    """What a file holds, and how it is compressed."""

    format: str
    """One of `FORMATS`."""
    compression: str = ""
    """A key of `_OPENERS`; empty for a plain file."""


@dataclass(frozen=True)
class Selection:
    """The files of a folder that are read, and how many others it holds."""

    names: tuple[str, ...] = ()
    """Sorted."""
    format: str = ""
    """Their format; empty if there are none."""
    others: Counter[str] = field(default_factory=Counter)
    """Files of the other formats, by format."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Files of unknown kinds, by suffix."""


def file_kind(name: str) -> FileKind | None:
    """The kind of a file with this name or path; None for an unknown one."""
    path = PurePosixPath(name.lower())
    compression = path.suffix if path.suffix in _OPENERS else ""
    suffix = PurePosixPath(path.stem).suffix if compression else path.suffix
    suffix = _SPELLINGS.get(suffix, suffix)
    # Parquet files are compressed inside, and are not read from start to end.
    if suffix not in FORMATS or (compression and suffix == ".parquet"):
        return None
    return FileKind(suffix, compression)


def known_kinds() -> str:
    """All known kinds, for messages."""
    compressions = ", ".join(_OPENERS)
    return f"{', '.join(FORMATS)} or .ndjson, all but .parquet also compressed ({compressions})"


def select_files(names: Iterable[str], depth: int = 0) -> Selection:
    """Choose the files of the first format that occurs among `names`.

    The first `depth` parts of each name are the folder itself. A file is skipped, and not counted, if any later part
    begins with `.` or `_`: such files are hidden, or the unfinished output of another program.
    """
    by_format: dict[str, list[str]] = {}
    unknown = Counter[str]()
    for name in sorted(names):
        path = PurePosixPath(name)
        # `..` is not hidden: whoever copies the files refuses it.
        if any(part.startswith((".", "_")) and part != ".." for part in path.parts[depth:]):
            continue
        kind = file_kind(name)
        if kind is None:
            unknown[path.suffix or "no suffix"] += 1
        else:
            by_format.setdefault(kind.format, []).append(name)
    chosen = next((one for one in FORMATS if one in by_format), "")
    others = Counter({one: len(found) for one, found in by_format.items() if one != chosen})
    return Selection(tuple(by_format.get(chosen, ())), chosen, others, unknown)


def open_file(path: Path) -> io.BufferedReader:
    """Open a file of a known kind for reading, decompressed as it is read.

    Damaged files raise EOFError, OSError, zlib.error or lzma.LZMAError, here or while they are read.
    """
    kind = file_kind(path.name)
    if kind is None or not kind.compression:
        return path.open("rb")
    return io.BufferedReader(_OPENERS[kind.compression](path), BUFFER_BYTES)


def _open_zstandard(path: Path) -> Any:
    import pyarrow as pa

    return pa.input_stream(str(path), compression="zstd")


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstandard,
}
