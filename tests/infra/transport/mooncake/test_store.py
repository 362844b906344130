"""A store whose master or holder dies, or that is full: writers wait, readers get an error, no bytes are invented."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.config import TransportConfig
from infra.files.run_folder import RunFolder
from infra.pools.local import LocalPool
from infra.processes.keep_running import KeptProcess
from infra.processes.process import Owner
from infra.records.data_path import StoreRecord
from infra.transport.base import StoreUnavailableError, TransferError
from infra.transport.mooncake.client import MooncakeClient
from infra.transport.mooncake.environment import check_mooncake, choose_protocol
from infra.transport.mooncake.store import start_store

pytestmark = pytest.mark.slow
MIB = 2**20
WRITER = """
import sys
from infra.records.data_path import StoreRecord
from infra.transport.mooncake.transport import MooncakeTransport
MooncakeTransport(StoreRecord.model_validate_json(sys.argv[1])).put("run/0/0/1", {"aux": bytes(range(256)) * 2**15})
"""


class Store:
    """A store of a test's own, kept running as the flow keeps it."""

    def __init__(self, run: RunFolder, processes: list[KeptProcess]):
        self.record: StoreRecord = StoreRecord.read(run.store)
        self.master, self.holder = processes
        self.events: list[str] = []
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._stop.wait(0.1):
            for process in (self.master, self.holder):
                process.tend(lambda _line: None, self.events.append)

    def stop(self) -> None:
        self._stop.set()
        self._keeper.join()

    def kill(self, process: KeptProcess) -> None:
        """`kill -9` of the process itself; its supervisor ends with it."""
        for child in psutil.Process(process.process.pid).children(recursive=True):
            child.send_signal(signal.SIGKILL)


@pytest.fixture
def store(public_folder: Path) -> Iterator[Store]:
    try:
        check_mooncake()
    except ValueError as error:
        pytest.skip(str(error))
    run = RunFolder(public_folder / "run")
    pool, config = LocalPool(Owner("tests", run.logs)), TransportConfig(budget_mib=1)
    with start_store(pool, run, config, public_folder, print) as processes:
        opened = Store(run, processes)
        yield opened
        opened.stop()


@pytest.fixture
def client(store: Store) -> MooncakeClient:
    return MooncakeClient(store.record, wait_s=240.0)


def put(client: MooncakeClient, key: str, data: bytes) -> None:
    with client.staging.take(len(data)) as buffer:
        buffer.view[: len(data)] = data
        client.put(key, buffer.address, len(data))


def get(client: MooncakeClient, key: str, nbytes: int) -> bytes:
    with client.staging.take(nbytes) as buffer:
        client.get(key, buffer.address, nbytes)
        return bytes(buffer.view[:nbytes])


def test_a_killed_master_comes_back_and_writers_wait_for_it(store: Store, client: MooncakeClient) -> None:
    put(client, "run/0/0/1", b"before")
    store.kill(store.master)
    put(client, "run/0/1/1", b"after")
    assert get(client, "run/0/1/1", 5) == b"after"
    with pytest.raises(TransferError, match=r"run/0/0/1 cannot be read: it is gone from the store"):
        get(client, "run/0/0/1", 6)
    client.delete("run/0/0/1")
    assert client.keys() == ["run/0/1/1"]
    assert any("mooncake-master was killed by signal 9; restart 1" in event for event in store.events)


def test_a_master_that_stays_away_is_no_fault_of_an_object(store: Store) -> None:
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


def test_a_killed_holder_loses_its_objects_and_nothing_else(store: Store, client: MooncakeClient) -> None:
    data = os.urandom(9 * MIB)
    put(client, "run/0/0/1", data)
    store.kill(store.holder)
    with pytest.raises(TransferError, match="run/0/0/1 cannot be read"):
        get(client, "run/0/0/1", len(data))
    put(client, "run/0/1/1", data)
    assert get(client, "run/0/1/1", len(data)) == data


def test_a_writer_that_leaves_takes_nothing_along(store: Store, client: MooncakeClient) -> None:
    subprocess.run([sys.executable, "-c", WRITER, store.record.model_dump_json()], check=True, timeout=240)
    assert get(client, "run/0/0/1", 8 * MIB) == bytes(range(256)) * 2**15


def test_a_full_store_makes_its_writer_wait_and_evicts_nothing(store: Store) -> None:
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
    client._wait_s = 240.0
    later = threading.Timer(0.3, client.delete, ["run/0/0/1"])
    begun = time.monotonic()
    later.start()
    put(client, "run/0/99/1", b"x" * size)
    assert time.monotonic() - begun >= 0.3
    later.join()


def test_rdma_where_a_port_is_active(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert choose_protocol("auto", tmp_path) == "tcp"
    with pytest.raises(ValueError, match=r"no RDMA device of this machine has an active port"):
        choose_protocol("rdma", tmp_path)
    (port / "state").write_text("4: ACTIVE\n")
    assert choose_protocol("auto", tmp_path) == "rdma"
    assert choose_protocol("tcp", tmp_path) == "tcp"
