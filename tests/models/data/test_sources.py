"""Where text may lie: every kind of file, folders, addresses; the same text is the same documents."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from models.data.conversations import read_documents, source_hash, source_revision
from models.data.sources import find_source

RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes"}]}
    for number in range(5)
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def contents(source: object) -> list[str]:
    return [document.content_hash for document in read_documents(str(source))]


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_every_kind_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / f"a{kind}", RECORDS)
    assert contents(source) == contents(write(tmp_path / "b.jsonl", RECORDS))
    places = [document.place for document in read_documents(str(source))]
    last = {".jsonl": f"{source}:5", ".json": f"{source}, record 5", ".parquet": f"{source}, row 5"}
    assert places[-1] == last[kind]
    assert source_revision(str(source)) is None


def test_folders_are_read_whole_and_one_kind_alone(tmp_path: Path) -> None:
    """What lies beside the data describes it."""
    folder = tmp_path / "set"
    write(folder / "deep" / "b.parquet", RECORDS[3:])
    write(folder / "a.parquet", RECORDS[:3])
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "licence.txt").write_text("MIT")
    assert contents(folder) == contents(write(tmp_path / "all.jsonl", RECORDS))
    before = source_hash(str(folder))
    write(folder / "c.parquet", RECORDS[:1])
    assert source_hash(str(folder)) != before
    assert [Path(file.place).name for file in find_source(str(folder)).files] == ["a.parquet", "c.parquet", "b.parquet"]


def test_folders_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    for name, records in (("a", RECORDS[:3]), ("deep/b", RECORDS[3:])):
        memory.pipe_file(f"/set/{name}.jsonl", write(tmp_path / "x.jsonl", records).read_bytes())
    memory.pipe_file("/set/readme.txt", b"about")
    whole = contents(write(tmp_path / "all.jsonl", RECORDS))
    assert contents("memory://set/") == contents("memory://set") == whole
    first = next(read_documents("memory://set/"))
    assert first.place == "memory://set/a.jsonl:1"
    before = source_hash("memory://set")
    memory.pipe_file("/set/c.jsonl", write(tmp_path / "x.jsonl", RECORDS[:1]).read_bytes())
    assert source_hash("memory://set") != before
    assert len(contents("memory://set")) == 6


REFUSALS = {
    "no list": ("a.json", b"{}", r"a\.json: a dict, not a list of records"),
    "broken list": ("a.json", b'[{"text": "x"},\n', r"a\.json:2: not valid JSON"),
    "no Parquet": ("a.parquet", b"PAR1 or not", r"a\.parquet cannot be read as Parquet"),
    "empty list": ("a.json", b"[]", r"a\.json is empty"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(tmp_path: Path, case: str) -> None:
    name, content, message = REFUSALS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents(str(tmp_path / name)))


def test_folders_without_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "notes.md").write_text("about")
    with pytest.raises(ValueError, match="holds no file of a known kind"):
        source_hash(str(tmp_path))
    fsspec.filesystem("memory").pipe_file("/nothing/notes.md", b"about")
    with pytest.raises(ValueError, match="holds no file of a known kind"):
        source_hash("memory://nothing")
