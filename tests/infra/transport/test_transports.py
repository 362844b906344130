"""All transports: whole objects or errors, never something in between."""

import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.config import TransportConfig
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.data_path import ObjectRecord
from infra.records.sharing import Sharing
from infra.refusal import Refusal
from infra.transport.arena import ArenaTransport
from infra.transport.base import TransferError, Transport
from infra.transport.choice import (
    missing_place,
    objects_folder,
    open_transport,
    resolved,
    run_memory_folder,
    sweep,
)
from infra.transport.files import FileTransport
from infra.transport.mooncake.transport import MooncakeTransport

KEY = "run/0/3/1"
CAPACITY = 20_000
Make = Callable[[Path], Transport]
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture(params=["files", "arena", "mooncake"], scope="session")
def make(request: pytest.FixtureRequest) -> Make:
    """Opens a transport with its objects in a folder; Mooncake's are in one store."""
    if request.param == "files":
        return FileTransport
    if request.param == "arena":
        return lambda folder: ArenaTransport(folder, CAPACITY, room_s=0.1)
    store = request.getfixturevalue("mooncake_store")
    return lambda _folder: MooncakeTransport(store)


@pytest.fixture
def transport(make: Make, tmp_path: Path) -> Iterator[Transport]:
    opened = make(tmp_path / "objects")
    yield opened
    opened.close()


def read(transport: Transport, record: ObjectRecord) -> dict[str, bytes]:
    into = {buffer.name: bytearray(buffer.nbytes) for buffer in record.buffers}
    transport.get(record, {name: memoryview(buffer) for name, buffer in into.items()})
    return {name: bytes(buffer) for name, buffer in into.items()}


@settings(max_examples=50, deadline=None, suppress_health_check=UNCHECKED)
@given(
    buffers=st.dictionaries(st.sampled_from(["aux", "last", "more"]), st.binary(min_size=1, max_size=5000), min_size=1)
)
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, make: Make, buffers: dict[str, bytes]
) -> None:
    transport = make(tmp_path_factory.mktemp("objects"))
    record = transport.put(KEY, buffers)
    assert record.nbytes == sum(map(len, buffers.values()))
    assert read(transport, record) == buffers
    assert transport.verify(record)
    assert list(transport.keys()) == [KEY]
    transport.delete(KEY)
    transport.delete(KEY)
    assert list(transport.keys()) == []
    assert not transport.verify(record)
    transport.close()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 bytes; Mooncake's pieces are of 24, so that neither divides the other."""
    monkeypatch.setattr("infra.transport.base.BLOCK", 16)
    for name in ("infra.transport.mooncake.client.PIECE", "infra.transport.mooncake.transport.PIECE"):
        monkeypatch.setattr(name, 24)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=50, deadline=None, suppress_health_check=UNCHECKED)
@given(data=st.data())
def test_a_part_comes_out(tmp_path_factory: pytest.TempPathFactory, make: Make, data: st.DataObject) -> None:
    transport = make(tmp_path_factory.mktemp("objects"))
    buffers = {name: os.urandom(data.draw(st.integers(1, 100))) for name in ("aux", "last", "more")}
    record = transport.put(KEY, buffers)
    assert [len(buffer.xxh3) for buffer in record.buffers] == [32 * -(-len(x) // 16) for x in buffers.values()]
    names = data.draw(st.sets(st.sampled_from(list(buffers)), min_size=1))
    parts = {name: data.draw(st.integers(0, len(buffers[name]) - 1)) for name in names}
    into = {name: bytearray(data.draw(st.integers(1, len(buffers[name]) - start))) for name, start in parts.items()}
    transport.get(record, {name: memoryview(part) for name, part in into.items()}, parts)
    assert into == {name: buffers[name][start : start + len(into[name])] for name, start in parts.items()}
    assert read(transport, record) == buffers
    with pytest.raises(TransferError, match="expected"):
        transport.get(record, {"aux": memoryview(bytearray(2))}, {"aux": len(buffers["aux"]) - 1})
    transport.delete(KEY)
    transport.close()


@pytest.mark.usefixtures("small_blocks")
def test_of_a_part_its_own_blocks_are_verified(
    transport: Transport, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    content, part = os.urandom(64), memoryview(bytearray(8))
    record = transport.put(KEY, {"aux": content})
    damage(transport, tmp_path, record, content[24:48], 16)
    transport.get(record, {"aux": part}, {"aux": 20})
    assert part == content[20:28]
    with pytest.raises(TransferError, match="checksum of aux"):
        transport.get(record, {"aux": part}, {"aux": 28})
    transport.delete(KEY)


def test_another_process_reads_what_one_has_written(make: Make, tmp_path: Path) -> None:
    first, second = make(tmp_path / "objects"), make(tmp_path / "objects")
    record = first.put(KEY, {"aux": b"0123456789", "last": b"abc"})
    first.close()
    assert read(second, record) == {"aux": b"0123456789", "last": b"abc"}
    again = second.put(KEY, {"aux": b"new"})
    assert read(second, again) == {"aux": b"new"}
    assert list(second.keys()) == [KEY]
    second.delete(KEY)
    second.close()


@pytest.mark.parametrize("position", [0, 5, 12])
def test_a_changed_byte_is_found(transport: Transport, tmp_path: Path, position: int) -> None:
    data = os.urandom(13)
    record = transport.put(KEY, {"aux": data[:10], "last": data[10:]})
    damage(transport, tmp_path, record, data, position)
    assert not transport.verify(record)
    with pytest.raises(TransferError, match=r"run/0/3/1: checksum of (aux|last)"):
        read(transport, record)
    transport.delete(KEY)


def damage(transport: Transport, tmp_path: Path, record: ObjectRecord, data: bytes, position: int) -> None:
    if isinstance(transport, MooncakeTransport):
        client = transport.client
        with client.staging.take(record.nbytes) as staged:
            client.get(record.key, staged.address, record.nbytes)
            place = bytes(staged.view[: record.nbytes]).find(data) + position
            staged.view[place] ^= 1
            client.put(record.key, staged.address, record.nbytes)
    else:
        files = (
            (tmp_path / "objects").iterdir() if isinstance(transport, FileTransport) else [tmp_path / "objects/arena"]
        )
        flip(next(iter(files)), data, position)


def flip(file: Path, data: bytes, position: int) -> None:
    """Change one bit of an object where it lies."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
        place = memory.find(data) + position
        assert place >= position, "it lies somewhere else"
        memory[place] ^= 1


def test_another_size_is_found(transport: Transport) -> None:
    record = transport.put(KEY, {"aux": b"0123456789"})
    with pytest.raises(TransferError, match="aux is 10 bytes, expected 4"):
        transport.get(record, {"aux": memoryview(bytearray(4))})
    transport.put(KEY, {"aux": b"012345678"})
    with pytest.raises(TransferError, match=r"another size|cannot be read"):
        read(transport, record)
    transport.delete(KEY)


def test_a_missing_object_is_named(transport: Transport) -> None:
    record = transport.put(KEY, {"aux": b"0"})
    transport.delete(KEY)
    with pytest.raises(TransferError, match=r"run/0/3/1 .*is gone"):
        read(transport, record)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow over 100 kB."""
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, previous)


def test_objects_of_many_pieces(make: Make, tmp_path: Path) -> None:
    transport = make(tmp_path / "objects")
    data = os.urandom(CAPACITY if isinstance(transport, ArenaTransport) else 10 * 2**20 + 1)
    record = transport.put(KEY, {"aux": data[:-7], "last": data[-7:]})
    assert read(transport, record) == {"aux": data[:-7], "last": data[-7:]}
    transport.delete(KEY)
    assert list(transport.keys()) == []
    transport.close()


DIES_WRITING = """
import os, signal, sys
from pathlib import Path
from infra.transport.files import FileTransport
os.posix_fallocate = lambda file, start, nbytes: os.truncate(file, nbytes) or os.kill(os.getpid(), signal.SIGKILL)
FileTransport(Path(sys.argv[1])).put(sys.argv[2], {"aux": bytes(1000)})
"""


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    transport = FileTransport(tmp_path)
    for key in (KEY, "run/0/4/1"):
        died = subprocess.run([sys.executable, "-c", DIES_WRITING, tmp_path, key], check=False)
        assert died.returncode == -signal.SIGKILL
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 2000
    sweep(transport, lambda: {KEY})
    (left,) = tmp_path.iterdir()
    record = transport.put(KEY, {"aux": b"0123456789"})
    assert not left.exists()
    assert read(transport, record) == {"aux": b"0123456789"}


@pytest.mark.usefixtures("small_disk")
def test_no_room_for_a_file_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    transport = FileTransport(tmp_path)
    with pytest.raises(TransferError, match=r"lower transport\.budget_mib"):
        transport.put(KEY, {"aux": bytes(200_000)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_disk")
def test_no_room_for_an_arena_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"no room for 200000 bytes .* lower transport\.budget_mib"):
        ArenaTransport(tmp_path, 200_000)
    assert not (tmp_path / "arena").exists()


def test_the_arena_is_chosen_where_shared_memory_is_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, large = RunFolder(tmp_path / "a-run"), RunFolder(tmp_path / "a-large-run")
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path))
    assert isinstance(open_transport(TransportConfig(budget_mib=1), run), ArenaTransport)
    assert isinstance(open_transport(TransportConfig(budget_mib=1, kind="files"), run), FileTransport)
    assert objects_folder(TransportConfig(budget_mib=1), run) == run_memory_folder(run) / "objects"
    assert isinstance(open_transport(TransportConfig(budget_mib=2**26), large), FileTransport)
    assert objects_folder(TransportConfig(budget_mib=2**26), large) == large.path / "objects"
    with pytest.raises(Refusal, match=r"MiB are free in .*, and 67108912 MiB are needed: make it larger"):
        objects_folder(TransportConfig(budget_mib=2**26, kind="arena"), large)
    chosen = objects_folder(TransportConfig(folder=str(tmp_path / "mine")), run)
    assert chosen == tmp_path / "mine" / "draftsmith-a-run" / "objects"


def test_a_process_that_joins_a_run_makes_nothing_and_maps_pages_as_it_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of users: a container of its own has another shared memory, and users would wait for the pages."""
    config, run, flags = TransportConfig(budget_mib=1), RunFolder(tmp_path / "a-run"), list[int]()
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    run.path.mkdir()
    assert resolved(config, run) == config
    with pytest.raises(Refusal, match=rf"does not see the run's folder {tmp_path}/shm/draftsmith-a-run/objects"):
        open_transport(config, run, joins=True)
    assert not list((tmp_path / "shm").iterdir())

    class Map(mmap.mmap):
        def __new__(cls, *arguments: Any, **named: Any) -> "Map":
            flags.append(named["flags"])
            return super().__new__(cls, *arguments, **named)

    monkeypatch.setattr(mmap, "mmap", Map)
    first, joined = open_transport(config, run), open_transport(config, run, joins=True)
    assert flags == [mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.MAP_SHARED]
    record = joined.put(KEY, {"aux": b"abc"})
    assert read(first, record) == {"aux": b"abc"}
    told = resolved(config, run)
    assert (told.kind, told.folder) == ("arena", str(tmp_path / "shm"))
    # The joining process has another shared memory of its own, and sees that of the run.
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path / "other"))
    assert missing_place(told, run) is None
    again = open_transport(told, run, joins=True)
    assert read(again, record) == {"aux": b"abc"}
    for transport in (first, joined, again):
        transport.close()
    assert missing_place(told, RunFolder(tmp_path / "another-run")) == tmp_path / "another-run"


def test_a_run_whose_objects_lie_on_disk_names_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "a-run")
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path))
    run_memory_folder(run).mkdir()
    write_atomically(run.sharing, Sharing(mode="apart", why="", budget_bytes=1, on_disk=True))
    assert resolved(TransportConfig(), run) == TransportConfig()
