"""Where text may lie: every kind of file, folders, addresses; the same text is the same documents."""

import errno
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from infra.refusal import Refusal
from models.data import sources
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
    write(folder / ".cache" / "old.parquet", RECORDS)
    assert contents(folder) == contents(write(tmp_path / "all.jsonl", RECORDS))
    before = source_hash(str(folder))
    write(folder / "c.parquet", RECORDS[:1])
    assert source_hash(str(folder)) != before
    assert [Path(file.place).name for file in find_source(str(folder)).files] == ["a.parquet", "c.parquet", "b.parquet"]


@pytest.mark.parametrize("name", ["a.jsonl", ""])
def test_a_file_that_nobody_may_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = write(tmp_path / "a.jsonl", RECORDS)

    def denied(_file: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(sources, "sha256_file", denied)
    with pytest.raises(Refusal, match=r"data\.source .*a\.jsonl cannot be read \(Permission denied\): check its perm"):
        find_source(str(tmp_path / name))


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


@pytest.mark.parametrize("name", ["../../outside.jsonl", "a/../../outside.jsonl"])
def test_no_object_is_copied_outside_the_cache(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Object stores take names that file systems read as paths elsewhere."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    folder = f"{s3_bucket}/{tmp_path.name}"
    fsspec.filesystem("s3").pipe(f"{folder}/{name}", b'{"text": "one"}\n')
    with pytest.raises(Refusal, match="whose name is no path below it: rename it"):
        find_source(folder)
    assert not list(tmp_path.rglob("outside.jsonl"))


def test_all_broken_records_are_named_at_once(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [
        '{"text": "one"}',
        "{broken",
        '{"prompt": 1}',
        '{"messages": []}',
        '{"text": "two"}',
        '{"text": "\\ud800"}',
    ]
    source.write_text("\n".join([*lines, "[" * 10_000]))
    with pytest.raises(Refusal) as refused:
        list(read_documents(str(source)))
    said = str(refused.value)
    for line, what in [(2, "not valid JSON"), (3, "its keys"), (4, "no turns"), (6, "surrogate"), (7, "too deeply")]:
        assert f"{source}:{line}" in said
        assert what in said
    assert f"{source}:1:" not in said
    source.write_text("{\n" * 50)
    with pytest.raises(Refusal) as refused:
        list(read_documents(str(source)))
    assert str(refused.value).count(f"{source}:") == 10


@pytest.mark.parametrize(
    "turn", [{"tool_calls": 5}, {"tool_calls": {"a": 1}}, {"name": {"a": 1}}, {"tool_calls": "[" * 2000}]
)
def test_odd_tool_calls_are_refused_with_their_line(tmp_path: Path, turn: dict[str, Any]) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": [{"role": "assistant", "content": "x"} | turn]}])
    with pytest.raises(Refusal, match=r"a\.jsonl:1: turn 1"):
        list(read_documents(str(source)))
