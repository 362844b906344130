"""Reads the records of a file, whatever its kind, each with its place for people.

Used by the processes that regenerate text and prepare samples.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.refusal import Refusal
from models.data.sources import Source, SourceFile

Row = tuple[str, Any]
"""Where it was read, for people, and what was read: of a text file, a record with `text`."""

ROWS = 1024
"""Of a Parquet file, read at once."""


def read_rows(source: Source) -> Iterator[Row]:
    """Every record of every file, in order. Raises Refusal, with file and line or row, for what cannot be read."""
    for file in source.files:
        yield from _READERS[file.path.suffix](file)


def _jsonl(file: SourceFile) -> Iterator[Row]:
    for number, line in _lines(file.path, file.place):
        if not line.strip():
            continue
        place = f"{file.place}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise Refusal(
                f"{place}: not valid JSON ({error.msg}, column {error.colno}): write one JSON object per line"
            ) from error
        yield place, record


def _json(file: SourceFile) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(file.path, file.place))
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refusal(
            f"{file.place}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}): write one list of "
            "records, or one record a line and call the file .jsonl"
        ) from error
    if not isinstance(records, list):
        raise Refusal(f"{file.place}: a {type(records).__name__}, not a list of records: write [...] around them")
    yield from ((f"{file.place}, record {number}", record) for number, record in enumerate(records, start=1))


def _parquet(file: SourceFile) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        content = parquet.ParquetFile(file.path)
        number = 0
        for batch in content.iter_batches(ROWS):
            for record in batch.to_pylist():
                number += 1
                yield f"{file.place}, row {number}", record
    except (pa.ArrowException, OSError) as error:
        raise Refusal(f"{file.place} cannot be read as Parquet ({error}): write or fetch it again") from error


def _paragraphs(file: SourceFile) -> Iterator[Row]:
    """Documents are separated by one or more blank lines."""
    block: list[str] = []
    start = 1
    for number, line in _lines(file.path, file.place):
        if line.strip():
            start = start if block else number
            block.append(line.rstrip("\n"))
        elif block:
            yield f"{file.place}:{start}", {"text": "\n".join(block)}
            block = []
    if block:
        yield f"{file.place}:{start}", {"text": "\n".join(block)}


def _lines(path: Path, place: str) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        try:
            yield from enumerate(file, start=1)
        except UnicodeDecodeError as error:
            raise Refusal(f"{place} is not UTF-8 text ({error.reason} near byte {error.start}): convert it") from error


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".txt": _paragraphs}
