"""The plain transport: whole objects or errors, never something in between."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.config import TransportConfig
from infra.run_folder import RunFolder
from infra.transport.base import TransferError
from infra.transport.choice import objects_folder, run_memory_folder
from infra.transport.files import FileTransport

KEY = "run/0/3/1"


@pytest.fixture
def transport(tmp_path):
    return FileTransport(tmp_path / "objects")


def read(transport, record):
    into = {buffer.name: bytearray(buffer.nbytes) for buffer in record.buffers}
    transport.get(record, {name: memoryview(buffer) for name, buffer in into.items()})
    return {name: bytes(buffer) for name, buffer in into.items()}


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["aux", "last", "more"]), st.binary(min_size=1, max_size=5000), min_size=1))
def test_what_goes_in_comes_out(tmp_path_factory, buffers):
    transport = FileTransport(tmp_path_factory.mktemp("objects"))
    record = transport.put(KEY, buffers)
    assert record.nbytes == sum(map(len, buffers.values()))
    assert read(transport, record) == buffers
    assert transport.verify(record)
    assert list(transport.keys()) == [KEY]
    transport.delete(KEY)
    transport.delete(KEY)
    assert list(transport.keys()) == []
    assert not transport.verify(record)


@pytest.mark.parametrize("position", [0, 5, 12])
def test_a_changed_byte_is_found(transport, position):
    record = transport.put(KEY, {"aux": b"0123456789", "last": b"abc"})
    path = transport.folder / record.location
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert not transport.verify(record)
    with pytest.raises(TransferError, match=r"run/0/3/1: checksum of (aux|last)"):
        read(transport, record)


def test_another_size_is_found(transport):
    record = transport.put(KEY, {"aux": b"0123456789"})
    (transport.folder / record.location).write_bytes(b"012345678")
    with pytest.raises(TransferError, match="another size"):
        read(transport, record)
    record = transport.put(KEY, {"aux": b"0123456789"})
    with pytest.raises(TransferError, match="aux is 10 bytes, expected 4"):
        transport.get(record, {"aux": memoryview(bytearray(4))})


def test_a_missing_object_is_named(transport):
    record = transport.put(KEY, {"aux": b"0"})
    transport.delete(KEY)
    with pytest.raises(TransferError, match="run/0/3/1 is gone"):
        read(transport, record)


def test_no_room_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    import resource
    import signal

    transport = FileTransport(tmp_path / "objects")
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TransferError, match=r"lower transport\.budget_mib"):
            transport.put(KEY, {"aux": bytes(2000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert list(transport.folder.iterdir()) == []


def test_objects_lie_in_shared_memory_unless_it_is_too_small(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "a-run")
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path))
    assert objects_folder(TransportConfig(budget_mib=1), run) == run_memory_folder(run) / "objects"
    assert objects_folder(TransportConfig(budget_mib=2**40), run) == run.path / "objects"
    chosen = objects_folder(TransportConfig(folder=str(tmp_path / "mine")), run)
    assert chosen == tmp_path / "mine" / "draftsmith-a-run" / "objects"
