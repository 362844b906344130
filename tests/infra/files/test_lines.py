"""Files of one JSON object per line, torn in every way in which a machine may die."""

from pathlib import Path

import pytest

from infra.files.lines import as_line, last_object, read_objects, write_objects

OBJECTS = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 1e-17}]


@pytest.mark.parametrize(
    "end",
    [
        b"",
        b'{"step": 3, "lo',
        b'{"step": 3}',
        b"\0" * 4096,
        b"\0\0\0: 3}\n",
        b'{"step": 3, "lo\0\0\0\n\0\0',
        b"3\n",
        b"\xff\xfe\n",
    ],
)
def test_a_torn_end_is_ignored_and_cut_off(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(map(as_line, OBJECTS)).encode() + end)
    assert read_objects(path) == OBJECTS
    assert last_object(path) == OBJECTS[-1]
    write_objects(path, read_objects(path))
    with path.open("a") as file:
        file.write(as_line({"step": 3}))
    assert read_objects(path) == [*OBJECTS, {"step": 3}]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_objects(tmp_path / "none") == []
    assert last_object(tmp_path / "none") is None


def test_nothing_after_a_torn_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\0\n{"step": 3}\n')
    assert read_objects(path) == [{"step": 1}]
