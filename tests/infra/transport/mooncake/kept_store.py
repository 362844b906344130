"""A store of a test's own, kept running as the flow keeps it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.config import TransportConfig
from infra.files.run_folder import RunFolder
from infra.pools.local import LocalPool
from infra.processes.keep_running import KeptProcess
from infra.processes.process import Owner
from infra.records.data_path import StoreRecord
from infra.transport.mooncake.client import MooncakeClient
from infra.transport.mooncake.environment import check_mooncake
from infra.transport.mooncake.store import start_store

MIB = 2**20
WAIT_S = 240.0


class KeptStore:
    """The store, and the thread that restarts what dies."""

    def __init__(self, run: RunFolder, processes: list[KeptProcess]):
        self.record: StoreRecord = StoreRecord.read(run.store)
        self.master, *self.parts = processes
        self.holder = self.parts[0]
        self.events: list[str] = []
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._stop.wait(0.1):
            for process in (self.master, *self.parts):
                process.tend(lambda _line: None, self.events.append)

    def stop(self) -> None:
        self._stop.set()
        self._keeper.join()

    def kill(self, process: KeptProcess) -> None:
        """`kill -9` of the process itself; its supervisor ends with it."""
        for child in psutil.Process(process.process.pid).children(recursive=True):
            child.send_signal(signal.SIGKILL)


@contextmanager
def kept_store(folder: Path, budget_mib: int = 1, parts: int = 1) -> Iterator[KeptStore]:
    try:
        check_mooncake()
    except ValueError as error:
        pytest.skip(str(error))
    run, config = RunFolder(folder / "run"), TransportConfig(budget_mib=budget_mib)
    pool = LocalPool(Owner("tests", run.logs))
    with start_store(pool, run, config, folder, print, parts=parts) as processes:
        opened = KeptStore(run, processes)
        try:
            yield opened
        finally:
            opened.stop()


def put(client: MooncakeClient, key: str, data: bytes, part: int | None = None) -> None:
    with client.staging.take(len(data)) as buffer:
        buffer.view[: len(data)] = data
        client.put(key, buffer.address, len(data), part)


def get(client: MooncakeClient, key: str, nbytes: int) -> bytes:
    with client.staging.take(nbytes) as buffer:
        client.get(key, buffer.address, nbytes)
        return bytes(buffer.view[:nbytes])
