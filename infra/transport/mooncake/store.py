"""A run's Mooncake store: its master, and the process that holds its memory, on the machine of the trainer.

`python -m infra.transport.mooncake.store RUN` holds the memory until it is stopped. It outlives generators and trainer
ranks, so that what they wrote and have not read yet outlives them too. Its memory is a file that is allocated before
it is mapped.
"""

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from infra.config import TransportConfig
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.network.ports import machine_address, reserved_port
from infra.pools.base import Pool
from infra.processes.exit import run_main
from infra.processes.keep_running import KeptProcess, OnLine
from infra.processes.process import module
from infra.records.data_path import StoreRecord
from infra.refusal import Refusal
from infra.transport.base import CANARY
from infra.transport.mooncake.client import client_of
from infra.transport.mooncake.environment import check_mooncake, choose_protocol, master_program, store_bytes
from infra.transport.mooncake.transport import MooncakeTransport

READY = "store ready"
CANARY_BYTES = 6 * 2**20
START_S = 600.0
"""Touching hundreds of gigabytes takes a while."""
POLL_S = 0.1
CLIENT_TTL_S = 10
"""A store that is silent for this long is dead, and its objects are gone."""
PUT_S = 120
"""A write not finished by then is a killed writer's; its room is given back."""


@contextmanager
def start_store(
    pool: Pool, run: RunFolder, config: TransportConfig, folder: Path, on_event: OnLine
) -> Iterator[list[KeptProcess]]:
    """A store that answers, with its memory in `folder`; its processes, to be kept running.

    Raises Refusal for what a person has to correct, ProcessFailedError, TimeoutError.
    """
    check_mooncake()
    address = machine_address(config.address)
    with ExitStack() as stack:
        rpc, web = (stack.enter_context(reserved_port(address))[0] for _ in range(2))
        store = StoreRecord(
            master=f"{address}:{rpc}",
            web=f"{address}:{web}",
            protocol=choose_protocol(config.protocol),
            segment=str(folder / "segment"),
            nbytes=store_bytes(config),
        )
        write_atomically(run.store, store)
        master = KeptProcess(partial(pool.launch, "mooncake-master", _master_command(address, rpc, web)), endless=True)
        stack.enter_context(closing(master))
        holder = KeptProcess(
            partial(pool.launch, "mooncake-store", module("infra.transport.mooncake.store", run.path)), endless=True
        )
        stack.enter_context(closing(holder))
        _wait_until_ready(master, holder, on_event)
        yield [master, holder]


def _master_command(address: str, rpc: int, web: int) -> list[str]:
    options = {
        "rpc_address": address,
        "rpc_port": rpc,
        "metrics_host": address,
        "metrics_port": web,
        "enable_metric_reporting": "false",
        # Full means full: a writer waits, nothing is thrown away.
        "eviction_high_watermark_ratio": 1.0,
        "allow_evict_soft_pinned_objects": "false",
        "client_ttl": CLIENT_TTL_S,
        "put_start_discard_timeout_sec": PUT_S,
        "put_start_release_timeout_sec": PUT_S + 1,
    }
    return [str(master_program()), *(f"--{name}={value}" for name, value in options.items())]


def _wait_until_ready(master: KeptProcess, holder: KeptProcess, on_event: OnLine) -> None:
    lines: list[str] = []
    deadline = time.monotonic() + START_S
    while not any(line.startswith(READY) for line in lines):
        for process in (master, holder):
            process.tend(lines.append, on_event)
            if process.failure is not None:
                raise process.failure
        if time.monotonic() > deadline:
            raise TimeoutError(f"the store was not ready within {START_S:g} s; its log is {holder.process.log}")
        time.sleep(POLL_S)
    on_event(next(line for line in lines if line.startswith(READY)))


def mount(store: StoreRecord) -> None:
    """Make the segment, every page of it in memory, and offer it to the master."""
    segment = Path(store.segment)
    segment.parent.mkdir(parents=True, exist_ok=True)
    segment.unlink(missing_ok=True)
    try:
        with segment.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, store.nbytes)
    except OSError as error:
        raise Refusal(
            f"no room for a store of {store.nbytes} bytes in {segment.parent}: {error.strerror}; lower "
            "transport.budget_mib or give transport.folder a larger file system"
        ) from error
    answer = client_of(store).store.mount_segment(store.segment, store.nbytes, 0, store.protocol, "")
    if answer["ret"]:
        raise ConnectionError(f"Mooncake's master does not take the segment (status {answer['ret']})")


def check_canary(store: StoreRecord, name: str) -> None:
    """Write, read and delete an object of more than one piece."""
    transport, key = MooncakeTransport(store), f"{name}{CANARY}store-{os.getpid()}"
    record = transport.put(key, {"canary": os.urandom(CANARY_BYTES)})
    whole = transport.verify(record)
    transport.delete(key)
    if not whole:
        raise ConnectionError("the store did not give back what was written to it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = RunFolder(parser.parse_args().run.absolute())
    store = StoreRecord.read(run.store)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    mount(store)
    check_canary(store, run.name)
    print(f"{READY}: {store.nbytes // 2**20} MiB by {store.protocol} at {store.master}", flush=True)
    stop.wait()


if __name__ == "__main__":
    run_main(main)
