"""Kept hidden states: found again by whoever has the same text, and only where they are whole."""

import os
from pathlib import Path

import fsspec
import pytest

from infra.config import TransportConfig
from infra.transport.base import TransferError
from infra.transport.stored import StoredTransport, local_folder

NAME = "0123abcd"
DATA = {"aux": b"0123456789", "last": b"abc"}


def test_on_s3(s3_bucket: str) -> None:
    first, second = (StoredTransport(f"{s3_bucket}/kept") for _ in range(2))
    data = os.urandom(12 * 2**20)
    record = first.put(NAME, {"aux": data[:-5], "last": data[-5:]})
    assert second.find(NAME) == record
    assert second.find("another") is None
    into = {"aux": bytearray(len(data) - 5), "last": bytearray(5)}
    second.get(record, {name: memoryview(buffer) for name, buffer in into.items()})
    assert bytes(into["aux"] + into["last"]) == data
    part = memoryview(bytearray(100))
    second.get(record, {"aux": part}, {"aux": 5 * 2**20})
    assert part == data[5 * 2**20 : 5 * 2**20 + 100]
    fsspec.filesystem("s3").pipe_file(f"{s3_bucket}/kept/{NAME}", data[:-1])
    assert second.find(NAME) is None


def test_another_process_finds_it(tmp_path: Path) -> None:
    record = StoredTransport(str(tmp_path / "kept")).put(NAME, DATA)
    other = StoredTransport(f"file://{tmp_path}/kept")
    other.delete(NAME)
    assert other.find(NAME) == record
    into = {name: bytearray(len(data)) for name, data in DATA.items()}
    other.get(record, {name: memoryview(buffer) for name, buffer in into.items()})
    assert into == DATA
    assert list(other.keys()) == []
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [NAME, f"{NAME}.json"]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "record gone"])
def test_what_is_not_whole_is_not_found(tmp_path: Path, damage: str) -> None:
    transport = StoredTransport(str(tmp_path))
    record = transport.put(NAME, DATA)
    file = tmp_path / NAME
    if damage == "flip":
        file.write_bytes(b"x" + file.read_bytes()[1:])
    elif damage == "cut":
        os.truncate(file, 12)
    else:
        (file if damage == "gone" else tmp_path / f"{NAME}.json").unlink()
    assert transport.find(NAME) is None
    if damage != "record gone":
        with pytest.raises(TransferError, match=r"checksum of aux|another size|is gone"):
            transport.get(record, {name: memoryview(bytearray(len(data))) for name, data in DATA.items()})
    assert transport.put(NAME, DATA) == record
    assert transport.find(NAME) == record


def test_where_it_lies(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("memory://bucket") is None
    with pytest.raises(ValueError, match=r"say where by transport\.folder"):
        TransportConfig(kind="stored")
