"""A run's Mooncake store: its master, and on each of the trainer's machines a process that holds a part of its memory.

`python -m infra.transport.mooncake.store RUN --part N` holds a part until it is stopped. It outlives generators and
trainer ranks, so that what they wrote and have not read yet outlives them too. Its memory is a file that is allocated
before it is mapped. A part that dies takes the objects in it along, which are captured again, and no others.
"""

import argparse
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from infra.config import TransportConfig
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.network.ports import listening_address, reserved_port
from infra.pools.base import Pool
from infra.processes.exit import run_main
from infra.processes.keep_running import KeptProcess, OnLine
from infra.processes.process import Process, module
from infra.records.data_path import StoreRecord
from infra.refusal import Refusal
from infra.transport.base import CANARY, READER
from infra.transport.budget import budget_of
from infra.transport.mooncake.client import client_of
from infra.transport.mooncake.environment import check_mooncake, choose_protocol, master_program, store_bytes
from infra.transport.mooncake.transport import MooncakeTransport

READY = "store ready"
CANARY_BYTES = 6 * 2**20
START_S = 600.0
"""Touching hundreds of gigabytes takes a while."""
POLL_S = 0.1
CLIENT_TTL_S = 10
"""A part that is silent for this long is dead, and its objects are gone."""
PUT_S = 120
"""A write not finished by then is a killed writer's; its room is given back."""


@contextmanager
def start_store(
    pool: Pool,
    run: RunFolder,
    config: TransportConfig,
    folder: Path,
    on_event: OnLine,
    *,
    holders: Pool | None = None,
    parts: int = 1,
) -> Iterator[list[KeptProcess]]:
    """A store that answers; its processes, to be kept running: the master, then those that hold its memory.

    The master runs on `pool`; the memory, in `folder` of each machine, is divided among the `parts` of the pool
    `holders` (default: the same). Raises Refusal for what a person has to correct, ProcessFailedError, TimeoutError.
    """
    check_mooncake()
    address = listening_address(config.address)
    shutil.rmtree(run.store_parts, ignore_errors=True)
    with ExitStack() as stack:
        rpc, web = (stack.enter_context(reserved_port(address))[0] for _ in range(2))
        store = StoreRecord(
            master=f"{address}:{rpc}",
            web=f"{address}:{web}",
            protocol=config.protocol,
            folder=str(folder),
            names=str(run.store_parts),
            nbytes=store_bytes(budget_of(config, run), parts),
            parts=parts,
        )
        write_atomically(run.store, store)
        master = KeptProcess(partial(pool.launch, "mooncake-master", _master_command(address, rpc, web)), endless=True)
        stack.enter_context(closing(master))
        held = [
            KeptProcess(partial(_launch_part, holders or pool, run, part, parts), endless=True) for part in range(parts)
        ]
        for one in held:
            stack.enter_context(closing(one))
        _wait_until_ready(master, held, on_event)
        yield [master, *held]


def _launch_part(pool: Pool, run: RunFolder, part: int, parts: int) -> Process:
    role = f"mooncake-store-{part}" if part else "mooncake-store"
    command = module("infra.transport.mooncake.store", run.path, "--part", str(part))
    return pool.launch(role, command, processes=parts, index=part)


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


def _wait_until_ready(master: KeptProcess, held: Sequence[KeptProcess], on_event: OnLine) -> None:
    missing, deadline = list(held), time.monotonic() + START_S
    while missing:
        lines: list[str] = []
        for process in (master, *missing):
            process.tend(lines.append, on_event)
            if process.failure is not None:
                raise process.failure
            if any(line.startswith(READY) for line in lines):
                on_event(lines[-1])
                missing.remove(process)
            lines.clear()
        if time.monotonic() > deadline:
            logs = ", ".join(str(process.process.log) for process in missing)
            raise TimeoutError(f"the store was not ready within {START_S:g} s; see {logs}")
        time.sleep(POLL_S)


def settled(run: RunFolder, part: int) -> StoreRecord:
    """The store's record with its protocol, which the first part chooses by the devices of the trainer's machine.

    Raises Refusal where RDMA is wanted and missing here, TimeoutError.
    """
    deadline = time.monotonic() + START_S
    while (store := StoreRecord.read(run.store)).protocol == "auto" and part:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the store's first part has not chosen a protocol within {START_S:g} s")
        time.sleep(POLL_S)
    protocol = choose_protocol(store.protocol)
    if store.protocol == "auto":
        store = store.model_copy(update={"protocol": protocol})
        write_atomically(run.store, store)
    return store


def mount(store: StoreRecord, segment: Path) -> str:
    """Make a part's memory, every page of it, and offer it to the master; how Mooncake names it.

    The file has no name afterwards: a killed process leaves nothing behind.
    """
    segment.parent.mkdir(parents=True, exist_ok=True)
    try:
        with segment.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, store.nbytes)
        client = client_of(store)
        answer = client.store.mount_segment(str(segment), store.nbytes, 0, store.protocol, "")
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise Refusal(
            f"no room for {store.nbytes} bytes of the store in {segment.parent}: {error.strerror}; lower "
            "transport.budget_mib or give transport.folder a larger file system"
        ) from error
    finally:
        segment.unlink(missing_ok=True)
    if answer["ret"]:
        raise ConnectionError(f"Mooncake's master does not take the memory (status {answer['ret']})")
    return client.store.get_hostname()


def check_canary(store: StoreRecord, name: str, part: int) -> None:
    """Write, read and delete an object of more than one piece."""
    transport, key = MooncakeTransport(store), f"{name}{CANARY}store-{part}-{os.getpid()}"
    record = transport.put(f"{key}{READER}{part}", {"canary": os.urandom(CANARY_BYTES)})
    whole = transport.verify(record)
    transport.delete(key)
    if not whole:
        raise ConnectionError("the store did not give back what was written to it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--part", type=int, default=0)
    arguments = parser.parse_args()
    run, part = RunFolder(arguments.run.absolute()), arguments.part
    store = settled(run, part)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    name = mount(store, Path(store.folder) / f"store-{run.name}-{part}")
    run.store_parts.mkdir(exist_ok=True)
    write_atomically(run.store_parts / str(part), name)
    check_canary(store, run.name, part)
    print(
        f"{READY}: {store.nbytes // 2**20} MiB by {store.protocol} at {name}, part {part + 1} of {store.parts}",
        flush=True,
    )
    stop.wait()


if __name__ == "__main__":
    run_main(main)
