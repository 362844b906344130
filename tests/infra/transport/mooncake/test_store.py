"""A store whose master or holder dies, or that is full: writers wait, readers get an error, no bytes are invented."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_store import MIB, WAIT_S, KeptStore, get, kept_store, put
from rdma_devices import put_rdma_device

from infra.transport.base import StoreUnavailableError, TransferError
from infra.transport.mooncake.client import MooncakeClient
from infra.transport.mooncake.environment import choose_protocol

pytestmark = pytest.mark.slow
WRITER = """
import sys
from infra.records.data_path import StoreRecord
from infra.transport.mooncake.transport import MooncakeTransport
MooncakeTransport(StoreRecord.model_validate_json(sys.argv[1])).put("run/0/0/1", {"aux": bytes(range(256)) * 2**15})
"""


@pytest.fixture
def store(public_folder: Path) -> Iterator[KeptStore]:
    with kept_store(public_folder) as opened:
        yield opened


@pytest.fixture
def client(store: KeptStore) -> MooncakeClient:
    return MooncakeClient(store.record, wait_s=WAIT_S)


def test_a_killed_master_comes_back_and_writers_wait_for_it(store: KeptStore, client: MooncakeClient) -> None:
    put(client, "run/0/0/1", b"before")
    store.kill(store.master)
    put(client, "run/0/1/1", b"after")
    assert get(client, "run/0/1/1", 5) == b"after"
    with pytest.raises(TransferError, match=r"run/0/0/1 cannot be read: it is gone from the store"):
        get(client, "run/0/0/1", 6)
    client.delete("run/0/0/1")
    assert client.keys() == ["run/0/1/1"]
    assert any("mooncake-master was killed by signal 9; restart 1" in event for event in store.events)


def test_a_master_that_stays_away_is_no_fault_of_an_object(store: KeptStore) -> None:
    client = MooncakeClient(store.record, wait_s=1.0)
    put(client, "run/0/0/1", b"before")
    store.stop()
    store.kill(store.master)
    for call in (
        lambda: put(client, "run/0/1/1", b"after"),
        lambda: get(client, "run/0/0/1", 6),
        lambda: client.delete("run/0/0/1"),
    ):
        with pytest.raises(StoreUnavailableError, match=r"master does not answer|the transfer failed"):
            call()


def test_a_killed_holder_loses_its_objects_and_nothing_else(store: KeptStore, client: MooncakeClient) -> None:
    data = os.urandom(9 * MIB)
    put(client, "run/0/0/1", data)
    store.kill(store.holder)
    with pytest.raises(TransferError, match="run/0/0/1 cannot be read"):
        get(client, "run/0/0/1", len(data))
    put(client, "run/0/1/1", data)
    assert get(client, "run/0/1/1", len(data)) == data


def test_a_writer_that_leaves_takes_nothing_along(store: KeptStore, client: MooncakeClient) -> None:
    subprocess.run([sys.executable, "-c", WRITER, store.record.model_dump_json()], check=True, timeout=240)
    assert get(client, "run/0/0/1", 8 * MIB) == bytes(range(256)) * 2**15


def test_a_full_store_makes_its_writer_wait_and_evicts_nothing(store: KeptStore) -> None:
    client = MooncakeClient(store.record, wait_s=1.0)
    size, written = 20 * MIB, range(3)
    assert len(written) * size > store.record.nbytes - size
    for index in written:
        put(client, f"run/0/{index}/1", bytes([index]) * size)
    with pytest.raises(TransferError, match=r"the store is full; raise transport\.budget_mib"):
        put(client, "run/0/3/1", bytes(size))
    assert client.keys() == [f"run/0/{index}/1" for index in written]
    for index in written:
        assert get(client, f"run/0/{index}/1", size) == bytes([index]) * size
    client._wait_s = WAIT_S
    later = threading.Timer(0.3, client.delete, ["run/0/0/1"])
    begun = time.monotonic()
    later.start()
    put(client, "run/0/99/1", b"x" * size)
    assert time.monotonic() - begun >= 0.3
    later.join()


def test_rdma_where_a_port_is_active(tmp_path: Path) -> None:
    put_rdma_device(tmp_path, "mlx5_0", "1: DOWN")
    assert choose_protocol("auto", tmp_path) == "tcp"
    with pytest.raises(ValueError, match=r"no RDMA device of this machine has an active port"):
        choose_protocol("rdma", tmp_path)
    file = put_rdma_device(tmp_path, "mlx5_0")
    assert choose_protocol("auto", tmp_path) == "rdma"
    assert choose_protocol("tcp", tmp_path) == "tcp"
    file.unlink()
    assert choose_protocol("auto", tmp_path) == "tcp"


def test_every_piece_is_deleted(store: KeptStore, client: MooncakeClient) -> None:
    """Of an object with a hole, which a broken-off write leaves, by as many calls as the sweeper makes."""
    for missing, calls in ((None, 1), (0, 1), (2, 2)):
        put(client, "run/0/0/1", bytes(40 * MIB))
        if missing is not None:
            assert client.store.batch_remove([f"run/0/0/1#{missing}"], True) == [0]
        for _ in range(calls):
            assert client.keys() == ["run/0/0/1"]
            client.delete("run/0/0/1")
        assert client.keys() == []
    client.delete("run/0/0/1")
