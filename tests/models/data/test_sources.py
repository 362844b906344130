"""Where text may lie: every kind of file, folders, addresses; the same text is the same documents."""

import bz2
import errno
import gzip
import json
import lzma
import re
import threading
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from infra.files.private import MARK
from infra.refusal import Refusal
from models.config.data import DataConfig
from models.data import sources
from models.data.conversations import read_documents, source_hash, source_revision, training_documents
from models.data.sources import find_source, private_since

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


def test_a_copy_of_users_prompts_is_as_private_and_as_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    files = fsspec.filesystem("memory")
    files.pipe({"/drift/prompts-0123456789ab.jsonl": b'{"text": "one"}\n', "/drift/other.jsonl": b'{"text": "two"}\n'})
    sampled, other = "memory://drift/prompts-0123456789ab.jsonl", "memory://drift/other.jsonl"
    (copy,), (public,) = (find_source(source).files for source in (sampled, other))
    assert copy.path.parent.stat().st_mode & 0o077 == 0
    mark = copy.path.parent / MARK
    assert mark.stat().st_mtime == pytest.approx(files.modified("/drift/prompts-0123456789ab.jsonl").timestamp())
    assert mark.stat().st_mtime == private_since(sampled)
    assert not (public.path.parent / MARK).exists()
    assert private_since(other) is None


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


HALF = '{"text": "half \\ud800"}'


def test_half_a_surrogate_pair_in_a_list_is_a_broken_record(tmp_path: Path) -> None:
    source, broken = tmp_path / "a.json", list[str]()
    source.write_text(f'[{{"text": "one"}}, {HALF}, {{"text": "\\ud83d\\ude00"}}]')
    config = DataConfig(source=str(source), max_broken_share=0.5)
    assert [document.text for document in training_documents(config, broken)] == ["one", "\U0001f600"]
    (fault,) = broken
    assert fault.startswith(f"{source}, record 2: holds half a surrogate pair")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz"])
def test_a_byte_that_is_not_utf8_breaks_one_record(tmp_path: Path, name: str) -> None:
    texts = [f"caf\u00e9 {number}" for number in range(1000)]
    lines = [text.encode() if number != 700 else text.encode("latin-1") for number, text in enumerate(texts)]
    records = [b'{"text": "' + line + b'"}' for line in lines]
    source, broken = tmp_path / name, list[str]()
    content = {".json": b"[" + b",\n".join(records) + b"]", ".txt": b"\n\n".join(lines)}
    whole = content.get(source.suffix, b"\n".join(records))
    source.write_bytes(gzip.compress(whole) if source.suffix == ".gz" else whole)
    read = training_documents(DataConfig(source=str(source), max_broken_share=0.001), broken)
    assert [document.text for document in read] == texts[:700] + texts[701:]
    (fault,) = broken
    place = {".json": ", record 701: holds a byte that is not UTF-8", ".txt": ":1401 is not UTF-8 text"}
    assert fault.startswith(str(source) + place.get(source.suffix, ":701 is not UTF-8 text"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_refused_as_a_whole(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "one"}\n'.encode(encoding) * 10)
    with pytest.raises(Refusal, match=r"a\.jsonl is not UTF-8 text, but UTF-16 or binary: convert it to UTF-8$"):
        list(training_documents(DataConfig(source=str(tmp_path / "a.jsonl"), max_broken_share=1.0)))


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    folder, archive = tmp_path / "set", tmp_path / "archive"
    write(folder / "a.jsonl", RECORDS[:2])
    write(archive / "deep" / "b.jsonl", RECORDS[2:])
    (folder / "2024").symlink_to(archive)
    (archive / "deep" / "up").symlink_to(folder)
    (archive / "again").symlink_to(archive / "deep")
    assert sorted(contents(folder)) == sorted(contents(write(tmp_path / "all.jsonl", RECORDS)))
    (folder / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(Refusal, match=r"b\.jsonl cannot be read \(No such file"):
        find_source(str(folder))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_hidden_and_unfinished_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Below the source alone: its own path may hold such names."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "_data" / ".set"
    write(folder / "year=2024" / "a.jsonl", RECORDS)
    for name in (".ipynb_checkpoints/a-checkpoint.jsonl", "_temporary/0/x.jsonl", "_x.jsonl", ".x.jsonl"):
        write(folder / name, RECORDS[:1])
    assert contents(f"{scheme}{folder}") == contents(write(tmp_path / "all.jsonl", RECORDS))


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_at_an_address_may_be_named_like_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "logs.parquet" / "part-0.parquet", RECORDS)
    assert contents(f"file://{tmp_path}/logs.parquet{end}") == contents(write(tmp_path / "all.jsonl", RECORDS))


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.ndjson", "A.JSONL"])
@pytest.mark.parametrize("compression", COMPRESSED)
def test_compressed_files(tmp_path: Path, name: str, compression: str) -> None:
    plain = write(tmp_path / name, RECORDS)
    if plain.suffix == ".txt":
        plain.write_text("one\n\ntwo\nmore\n\nthree\n")
    packed = tmp_path / f"{name}{compression}"
    packed.write_bytes(COMPRESSED[compression](plain.read_bytes()))
    assert contents(packed) == contents(plain)
    places = [[document.place for document in read_documents(str(source))] for source in (packed, plain)]
    assert places[0] == [place.replace(str(plain), str(packed)) for place in places[1]]
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(Refusal, match=rf"{re.escape(packed.name)} (is damaged|cannot be read) .*: compress or"):
        contents(packed)


@pytest.mark.parametrize("name", ["prompts.docx", "a.parquet.gz", "a.gz"])
def test_the_refusal_of_an_unknown_kind_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(Refusal, match=r"is of no known kind: .*\.parquet, \.jsonl, \.json, \.txt or \.ndjson.*\.zst"):
        find_source(str(tmp_path / name))


def test_an_address_with_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path / "site" / "a.jsonl", RECORDS)

    class Site(SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(source.parent))

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert contents(f"http://127.0.0.1:{server.server_port}/a.jsonl?download=true") == contents(source)
        server.shutdown()
