"""Reads the records of a file, whatever its kind, each with its place for people.

Used by the processes that regenerate text and prepare samples.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from infra.refusal import Refusal
from models.data.sources import ResolvedSource, SourceFile

Item = TypeVar("Item")
Row = tuple[str, Any]
"""Where it was read, for people, and what was read: of a text file, a record with `text`; of a broken line, the Refusal
that says so."""
MOST_FAULTS = 10
"""Records that one message names, so that a person mends them in one go."""

ROWS = 1024
"""Of a Parquet file, read at once."""


def read_rows(source: ResolvedSource) -> Iterator[Row]:
    """Every record of every file, in order. Raises Refusal, with file and line or row, for what cannot be read."""
    for file in source.files:
        yield from _READERS[file.path.suffix](file)


def converted(rows: Iterable[Row], convert: Callable[[str, Any], Item]) -> Iterator[Item]:
    """Every record as `convert(place, record)` makes it.

    After the first one that it refuses the rest is only checked; one Refusal then names the first `MOST_FAULTS`.
    """
    faults: list[str] = []
    for place, record in rows:
        try:
            item = convert(place, whole(record))
        except Refusal as error:
            faults.append(str(error))
            if len(faults) == MOST_FAULTS:
                break
            continue
        except RecursionError:
            faults.append(f"{place}: nested too deeply: correct or remove the record")
            continue
        if not faults:
            yield item
    if len(faults) > 1:
        raise Refusal(f"the first {len(faults)} records that cannot be used:\n  " + "\n  ".join(faults))
    if faults:
        raise Refusal(faults[0])


def whole(record: Any) -> Any:
    """The record; raises what is wrong with a broken one."""
    if isinstance(record, Refusal):
        raise record
    return record


def _jsonl(file: SourceFile) -> Iterator[Row]:
    for number, line in _lines(file.path, file.place):
        if not line.strip():
            continue
        yield f"{file.place}:{number}", _parsed(line, f"{file.place}:{number}")


def _parsed(line: str, place: str) -> Any:
    """What a line holds, or the Refusal that says what is wrong with it: the caller reports several at once."""
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return Refusal(f"{place}: not valid JSON ({error.msg}, column {error.colno}): write one JSON object per line")
    except UnicodeEncodeError:
        return Refusal(f"{place}: holds half a surrogate pair, which is no character: correct or remove the line")
    except (ValueError, RecursionError) as error:
        return Refusal(f"{place}: {_too_much(error)}: correct or remove the line")
    return record


def _too_much(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else "holds a number of too many digits"


def _json(file: SourceFile) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(file.path, file.place))
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refusal(
            f"{file.place}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}): write one list of "
            "records, or one record a line and call the file .jsonl"
        ) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{file.place}: {_too_much(error)}: correct the file") from error
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
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
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
    try:
        with path.open(encoding="utf-8") as file:
            yield from enumerate(file, start=1)
    except UnicodeDecodeError as error:
        raise Refusal(f"{place} is not UTF-8 text ({error.reason} near byte {error.start}): convert it") from error
    except OSError as error:
        raise Refusal(f"{place} cannot be read ({error.strerror}): check its permissions") from error


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".txt": _paragraphs}
