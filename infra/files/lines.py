"""Files with one JSON object per line, which one process appends to while others read.

A machine that dies while a line is being written leaves a torn end: part of a line, or zeros where data had not reached
the disk. Readers take the lines before it. The writer writes those back before it appends again.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.files.atomic import write_atomically


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of all whole lines before the first torn one; empty without a file."""
    return list(each_object(path))


def each_object(path: Path) -> Iterator[dict[str, Any]]:
    """The same, one at a time."""
    yield from (value for _, value in _placed(path))


def places_by(key: str, path: Path) -> dict[str, int]:
    """Where the line of each object begins, by one of its values; a torn end is cut off. For the file's one writer."""
    places, end = dict[str, int](), 0
    for line, value in _placed(path):
        places[value[key]] = end
        end += len(line)
    if path.is_file():
        os.truncate(path, end)
    return places


def last_object(path: Path) -> dict[str, Any] | None:
    """The object of the last whole line, without parsing earlier ones; None if there is none."""
    return next((value for line in reversed(_finished_lines(path)) if (value := _object(line)) is not None), None)


def as_line(value: Mapping[str, Any]) -> str:
    """An object as a line of such a file."""
    return json.dumps(value) + "\n"


def write_objects(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file, whole or not at all. For its one writer, before it appends."""
    write_atomically(path, "".join(map(as_line, objects)))


def _placed(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Whole lines and their objects."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            value = _object(line) if line.endswith(b"\n") else None
            if value is None:
                return
            yield line, value


def _finished_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
