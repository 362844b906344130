"""Reads the records of JSON, JSON lines, Parquet and text files, each with its place."""

import codecs
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, TypeVar

from infra.refusal import Refusal
from models.data.kinds import open_file
from models.data.sources import ResolvedSource, SourceFile
from models.data.tools import without_nulls

Item = TypeVar("Item")
Row = tuple[str, Any]
"""A place for messages, and the record: of a text file one with `text`, of a broken record its Refusal."""
MAX_FAULTS = 10
"""Most unusable records in one message."""
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are read at once."""


def read_rows(source: ResolvedSource) -> Iterator[Row]:
    """Every record of every file, in order. Raises Refusal, with file and line or row, for an unreadable one."""
    for file in source.files:
        yield from _READERS[file.kind.format](file)


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
    for place, line in _lines(file):
        if isinstance(line, Refusal):
            yield place, line
        elif line.strip():
            yield place, _parsed(line, place)


def _parsed(line: str, place: str) -> Any:
    """The value of a line, or a Refusal, which the caller may report together with others."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return Refusal(f"{place}: not valid JSON ({error.msg}, column {error.colno}): write one JSON object per line")
    except RecursionError:
        return Refusal(f"{place}: nested too deeply: correct or remove the line")
    except ValueError:
        return Refusal(f"{place}: holds a number of too many digits: correct or remove the line")
    return _characters(record, place) if _has_surrogates(line) else record


def _has_surrogates(text: str) -> bool:
    """Whether JSON text has escapes of surrogates; most are whole pairs."""
    return "\\ud" in text or "\\uD" in text


def _characters(record: Any, place: str) -> Any:
    """The record, or a Refusal if its text cannot be written as UTF-8."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        # `surrogateescape` maps the bytes 0x80 to 0xff to U+DC80 to U+DCFF.
        code = ord(error.object[error.start])
        what = "a byte that is not UTF-8, or " if 0xDC80 <= code <= 0xDCFF else ""
        return Refusal(f"{place}: holds {what}half a surrogate pair, which is no character: correct or remove it")
    except RecursionError:
        return Refusal(f"{place}: nested too deeply: correct or remove it")
    return record


def _json(file: SourceFile) -> Iterator[Row]:
    with _opened(file) as content:
        data = content.read()
    try:
        text = data.decode("utf-8-sig")
        is_doubtful = _has_surrogates(text)
    except UnicodeDecodeError:
        # Records are told apart only after parsing, so bad bytes are kept until their records are known.
        text = data.decode("utf-8-sig", "surrogateescape")
        is_doubtful = True
    del data
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
    del text
    for number, record in enumerate(records, start=1):
        place = f"{file.place}, record {number}"
        yield place, _characters(record, place) if is_doubtful else record


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
    start, block = "", list[str | Refusal]()
    for place, line in _lines(file):
        if isinstance(line, Refusal) or line.strip():
            start = start if block else place
            block.append(line)
        elif block:
            yield start, _paragraph(block)
            block = []
    if block:
        yield start, _paragraph(block)


def _paragraph(lines: Iterable[str | Refusal]) -> dict[str, str] | Refusal:
    """The record of a document, or the first Refusal among its lines."""
    texts = list[str]()
    for line in lines:
        if isinstance(line, Refusal):
            return line
        texts.append(line.rstrip("\r\n"))
    return {"text": "\n".join(texts)}


def _lines(file: SourceFile) -> Iterator[tuple[str, str | Refusal]]:
    """Place and text of each line; a Refusal for one that is not UTF-8."""
    with _opened(file) as content:
        for number, line in enumerate(content, start=1):
            place = f"{file.place}:{number}"
            try:
                # Windows programs write a byte-order mark.
                text: str | Refusal = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                text = Refusal(
                    f"{place} is not UTF-8 text ({error.reason}, byte {error.start + 1} of the line): convert the "
                    "file, or correct the line"
                )
            yield place, text


@contextmanager
def _opened(file: SourceFile) -> Iterator[BufferedReader]:
    """The decompressed content. Raises Refusal for a file that cannot be read, is damaged, or is UTF-16 or UTF-32."""
    try:
        with open_file(file.path) as content:
            head = content.peek(4)[:4]
            # No JSON and no text begins with a zero byte; UTF-16 without a mark has one in its first character.
            if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
                raise Refusal(f"{file.place} is not UTF-8 text, but UTF-16 or binary: convert it to UTF-8")
            yield content
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise Refusal(f"{file.place} is damaged ({error}): compress or fetch it again") from error
    except OSError as error:  # `strerror` is empty if the content is damaged
        remedy = "check its permissions" if error.strerror else "compress or fetch it again"
        raise Refusal(f"{file.place} cannot be read ({error.strerror or error}): {remedy}") from error


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".txt": _paragraphs}
