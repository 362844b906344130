"""Holds the memory of a run's Mooncake store. One process, on the machine of the trainer.

`python -m infra.transport.mooncake.store RUN` runs until it is stopped. It outlives generators and trainer ranks, so
that what they wrote and have not read yet outlives them too. Its memory is a file that is allocated before it is
mapped.
"""

import argparse
import os
import signal
import threading
from pathlib import Path

from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import StoreRecord
from infra.refusal import Refusal
from infra.transport.mooncake.client import client_of
from infra.transport.mooncake.transport import MooncakeTransport
from infra.transport.sweep import CANARY

READY = "store ready"
CANARY_BYTES = 6 * 2**20


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
