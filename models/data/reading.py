"""Reads the records of JSON, JSON lines, Parquet and text files, each with its place."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from infra.refusal import Refusal
from models.data.sources import ResolvedSource, SourceFile
from models.data.tools import without_nulls

Item = TypeVar("Item")
Row = tuple[str, Any]
"""A place for messages, and the record: of a text file one with `text`, of a broken line its Refusal."""
MAX_FAULTS = 10
"""Most unusable records in one message."""
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are read at once."""


def read_rows(source: ResolvedSource) -> Iterator[Row]:
    """Every record of every file, in order. Raises Refusal, with file and line or row, for an unreadable one."""
    for file in source.files:
        yield from _READERS[file.path.suffix](file)


def converted(
    rows: Iterable[Row],
    convert: Callable[[str, Any], Item],
    max_broken_share: float = 0.0,
    broken: list[str] | None = None,
) -> Iterator[Item]:
    """`convert(place, record)` of every record that can be used.

    Places and reasons of the others are added to `broken`. Raises one Refusal at the end, naming the first
    `MAX_FAULTS`, if their share exceeds `max_broken_share`. With a share of 0, nothing is yielded after the first one.
    """
    faults = [] if broken is None else broken
    records = 0
    for place, record in rows:
        records += 1
        try:
            item = convert(place, whole(record))
        except Refusal as error:
            faults.append(str(error))
        except RecursionError:
            faults.append(f"{place}: nested too deeply: correct or remove the record")
        else:
            if not faults or max_broken_share:
                yield item
            continue
        if not max_broken_share and len(faults) == MAX_FAULTS:
            break
    if len(faults) <= max_broken_share * records:
        return
    first = "\n  ".join(faults[:MAX_FAULTS])
    if max_broken_share:
        raise Refusal(
            f"{len(faults)} of {records} records cannot be used, more than data.max_broken_share={max_broken_share:g} "
            f"allows: correct them, or raise it. The first:\n  {first}"
        )
    raise Refusal(first if len(faults) == 1 else f"the first {len(faults)} records that cannot be used:\n  {first}")


def whole(record: Any) -> Any:
    """The record; raises the Refusal of a broken one."""
    if isinstance(record, Refusal):
        raise record
    return record


def _jsonl(file: SourceFile) -> Iterator[Row]:
    for number, line in _lines(file.path, file.place):
        if not line.strip():
            continue
        yield f"{file.place}:{number}", _parsed(line, f"{file.place}:{number}")


def _parsed(line: str, place: str) -> Any:
    """The value of a line, or a Refusal, which the caller may report together with others."""
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return Refusal(f"{place}: not valid JSON ({error.msg}, column {error.colno}): write one JSON object per line")
    except UnicodeEncodeError:
        return Refusal(f"{place}: holds half a surrogate pair, which is no character: correct or remove the line")
    except RecursionError:
        return Refusal(f"{place}: nested too deeply: correct or remove the line")
    except ValueError:
        return Refusal(f"{place}: holds a number of too many digits: correct or remove the line")
    return record


def _json(file: SourceFile) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(file.path, file.place))
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refusal(
            f"{file.place}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}): write one list of "
            "records, or one record a line and call the file .jsonl"
        ) from error
    except RecursionError as error:
        raise Refusal(f"{file.place}: nested too deeply: correct the file") from error
    except ValueError as error:
        raise Refusal(f"{file.place}: holds a number of too many digits: correct the file") from error
    if not isinstance(records, list):
        raise Refusal(f"{file.place}: a {type(records).__name__}, not a list of records: write [...] around them")
    yield from ((f"{file.place}, record {number}", record) for number, record in enumerate(records, start=1))


def _parquet(file: SourceFile) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        content = parquet.ParquetFile(file.path)
        number = 0
        for batch in content.iter_batches(PARQUET_ROWS):
            for record in batch.to_pylist():
                number += 1
                yield f"{file.place}, row {number}", without_nulls(record)
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
        with path.open(encoding="utf-8-sig") as file:  # Windows programs write a byte-order mark
            yield from enumerate(file, start=1)
    except UnicodeDecodeError as error:
        raise Refusal(f"{place} is not UTF-8 text ({error.reason} near byte {error.start}): convert it") from error
    except OSError as error:
        raise Refusal(f"{place} cannot be read ({error.strerror}): check its permissions") from error


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".txt": _paragraphs}
