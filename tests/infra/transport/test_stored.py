"""Kept hidden states: found again by whoever has the same text, and only where they are whole."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from infra import waiting
from infra.config import TransportConfig
from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.servers.s3 import S3Server
from infra.transport.base import StoreUnavailableError, TransferError
from infra.transport.files import StoredTransport, check_space, local_folder

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


def test_what_a_killed_writer_left_goes_when_it_is_old(tmp_path: Path) -> None:
    transport = StoredTransport(str(tmp_path))
    record = transport.put(NAME, DATA)
    writer = "import os; from infra.transport.files import StoredTransport; os.fsync = lambda _: os.abort()"
    for _ in range(2):
        command = f"{writer}; StoredTransport({str(tmp_path)!r}).put('another', {{'aux': b'0123456789'}})"
        subprocess.run([sys.executable, "-c", command], check=False, timeout=240)
    young, old = set(tmp_path.iterdir()) - {tmp_path / NAME, tmp_path / f"{NAME}.json"}
    then = time.time() - 2 * 86_400
    for file in (old, tmp_path / NAME):
        os.utime(file, (then, then))
    check_space(str(tmp_path), tokens=1, bytes_per_token=1)
    assert set(tmp_path.iterdir()) == {tmp_path / NAME, tmp_path / f"{NAME}.json", young}
    assert transport.find(NAME) == record


def test_where_it_lies(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("memory://bucket") is None
    with pytest.raises(ValueError, match=r"say where by transport\.folder"):
        TransportConfig(kind="stored")


@pytest.mark.parametrize("damage", [b"", bytes(200), b'{"key": "0123', b"[]"])
def test_a_torn_record_is_no_object_and_is_replaced(tmp_path: Path, damage: bytes) -> None:
    """As a power failure leaves it."""
    transport = StoredTransport(str(tmp_path))
    record = transport.put(NAME, DATA)
    (tmp_path / f"{NAME}.json").write_bytes(damage)
    assert transport.find(NAME) is None
    assert transport.put(NAME, DATA) == record
    assert transport.find(NAME) == record


def test_what_is_written_is_durable_before_it_is_named(tmp_path: Path) -> None:
    """The kernel is asked: object, record and folder are synced, each file before its rename."""
    trace = tmp_path / "trace"
    program = "import sys; from infra.transport.files import StoredTransport; " + (
        f"StoredTransport(sys.argv[1]).put({NAME!r}, {{'aux': b'0123456789'}})"
    )
    command = [sys.executable, "-c", AUDITED + program, str(tmp_path / "kept"), str(trace)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    calls = trace.read_text().split()
    assert calls == ["fsync", "rename", "fsync", "fsync", "rename", "fsync"]


AUDITED = """
import os, sys
fsync, rename = os.fsync, os.rename

def audit(event, arguments):
    if event == "os.rename" and "kept" in str(arguments[1]):
        note("rename")

def note(what):
    with open(sys.argv[2], "a") as file:
        file.write(what + " ")

def watched(descriptor):
    note("fsync")
    fsync(descriptor)

os.fsync = watched
sys.addaudithook(audit)
"""


@pytest.fixture
def s3_server(public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of the test's own, which it stops and starts."""
    monkeypatch.setattr("infra.servers.s3.START_S", 240.0)  # a busy machine
    server = S3Server(public_folder / "s3", Owner("tests", public_folder / "logs"))
    for name, value in server.access.environment.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir("bucket")
    yield server
    server.stop()
    fsspec.filesystem("s3").clear_instance_cache()


def test_a_store_that_takes_nothing_is_refused_before_anything_is_captured(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_space(f"{s3_bucket}/kept", tokens=100, bytes_per_token=10)
    with pytest.raises(Refusal, match=r"s3://mistyped/kept takes no objects .*bucket does not exist"):
        check_space("s3://mistyped/kept", tokens=100, bytes_per_token=10)
    with pytest.raises(Refusal, match=r"transport.folder: s3://nobodys-bucket-\?/kept takes no objects"):
        check_space("s3://nobodys-bucket-?/kept", tokens=100, bytes_per_token=10)
    monkeypatch.setattr("infra.transport.files.CHECK_S", 0.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(Refusal, match=r"takes no objects .*does not answer.*AWS_ENDPOINT_URL"):
        check_space(f"{s3_bucket}/kept", tokens=100, bytes_per_token=10)
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(Refusal, match="/sys/kept cannot be created"):
        check_space("/sys/kept", tokens=100, bytes_per_token=10)


def test_a_server_that_is_away_is_waited_for_and_damages_nothing(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client's own attempts take a quarter of a minute
    fsspec.filesystem("s3").clear_instance_cache()
    transport = StoredTransport("s3://bucket/kept", wait_s=240.0)
    record = transport.put(NAME, DATA)
    impatient = StoredTransport("s3://bucket/kept", wait_s=0.0)
    s3_server.stop()
    for call in (lambda: impatient.find(NAME), lambda: impatient.verify(record), lambda: impatient.put(NAME, DATA)):
        with pytest.raises(StoreUnavailableError, match="bucket/kept does not answer: check the object store"):
            call()

    def come_back(seconds: float) -> None:
        """Once somebody waits for it, and not before."""
        if s3_server.process.poll() is None:
            time.sleep(seconds)
        else:
            s3_server.start()

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=time.monotonic, sleep=come_back))
    assert transport.find(NAME) == record, "it was there all the time"
    assert "waiting up to 240 s: bucket/kept does not answer" in capsys.readouterr().out
