"""How fast transports are, against what this machine's memory and loopback can do: ratios taken in one run.

    python benchmarks/transport.py [--sizes 16,64,256] [--rounds 5] [--json benchmarks/results/transport.json]

In every round each way moves the same bytes once, one way after the other, warm: `memcpy` between two buffers, a plain
TCP socket to another process on loopback (`recv_into`, one byte back at the end), and put and get of every transport.
Mooncake's store is a process of its own, by TCP; the seconds inside its own calls are taken too. Checksums are part of
put and get; their share is measured apart.
"""

import argparse
import ctypes
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from infra.config import TransportConfig
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.pools.local import LocalPool
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.records.data_path import StoreRecord
from infra.transport.arena import ArenaTransport
from infra.transport.base import Transport
from infra.transport.files import FileTransport
from infra.transport.mooncake.store import start_store
from infra.transport.mooncake.transport import MooncakeTransport

RESULT = Path(__file__).parent / "results" / "transport.json"
MIB = 2**20
KEY = "benchmark/0/0/1"
RECEIVER = """
import socket, sys
size = int(sys.argv[1])
into = memoryview(bytearray(size))
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while True:
        at = 0
        while at < size:
            count = connection.recv_into(into[at:])
            if count == 0:
                sys.exit()
            at += count
        connection.sendall(b"x")
"""


def touched(nbytes: int) -> memoryview:
    """Memory whose every page is there."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


@contextmanager
def tcp_socket(nbytes: int) -> Iterator[socket.socket]:
    receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, str(nbytes)], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    with receiver, socket.create_connection(("127.0.0.1", int(receiver.stdout.readline()))) as connection:
        yield connection


def send(connection: socket.socket, data: memoryview) -> None:
    connection.sendall(data)
    assert connection.recv(1) == b"x"


class Watched:
    """Mooncake's library, with a watch on the calls that move bytes."""

    def __init__(self, library: Any):
        self._library, self.inside_s = library, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if name not in ("batch_put_from", "batch_get_into"):
            return found

        def timed(*arguments: object) -> object:
            begun = time.perf_counter()
            try:
                return found(*arguments)
            finally:
                self.inside_s = time.perf_counter() - begun

        return timed


def one_round(
    transports: dict[str, Transport], connection: socket.socket, source: memoryview, into: memoryview
) -> dict[str, float]:
    """Seconds of every way to move `source`."""
    pointers = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (into, source)]
    taken = {
        "memcpy": seconds(lambda: ctypes.memmove(pointers[0], pointers[1], source.nbytes)),
        "socket": seconds(lambda: send(connection, source)),
        "checksum": seconds(lambda: xxhash.xxh3_128_digest(source)),
    }
    for name, transport in transports.items():
        records = []
        taken[f"{name} put"] = seconds(lambda: records.append(transport.put(KEY, {"aux": source})))  # noqa: B023
        taken |= inside(transport, "put")
        taken[f"{name} get"] = seconds(lambda: transport.get(records[0], {"aux": into}))  # noqa: B023
        taken |= inside(transport, "get")
        assert into == source
        transport.delete(KEY)
    return taken


def inside(transport: Transport, way: str) -> dict[str, float]:
    """Seconds of the last put or get that Mooncake's own calls took."""
    if not isinstance(transport, MooncakeTransport):
        return {}
    return {f"inside mooncake {way}": transport.client.store.inside_s}


def measure(size_mib: int, rounds: int, base: Path) -> dict[str, object]:
    nbytes = size_mib * MIB
    source, into = touched(nbytes), touched(nbytes)
    source[:] = os.urandom(MIB) * size_mib
    run = RunFolder(base / f"run-{size_mib}")
    config = TransportConfig(kind="mooncake", budget_mib=2 * size_mib)
    with ExitStack() as stack:
        pool = LocalPool(Owner(run.name, run.logs))
        stack.enter_context(start_store(pool, run, config, run.path, lambda _line: None))
        connection = stack.enter_context(tcp_socket(nbytes))
        mooncake = MooncakeTransport(StoreRecord.read(run.store))
        mooncake.client.store = Watched(mooncake.client.store)
        transports: dict[str, Transport] = {
            "arena": ArenaTransport(base / f"arena-{size_mib}", 2 * nbytes),
            "files": FileTransport(base / f"files-{size_mib}"),
            "mooncake": mooncake,
        }
        one_round(transports, connection, source, into)
        taken = [one_round(transports, connection, source, into) for _ in range(rounds)]
    return summary(nbytes, taken)


def summary(nbytes: int, taken: list[dict[str, float]]) -> dict[str, object]:
    """Medians over rounds; ratios are of one round's figures."""

    def median_ratio(baseline: str, way: str) -> float:
        return round(statistics.median(one[baseline] / one[way] for one in taken), 3)

    ways = [way for way in taken[0] if way.endswith((" put", " get"))]
    return {
        "bytes": nbytes,
        "GB_per_s": {way: round(nbytes / 1e9 / statistics.median(one[way] for one in taken), 2) for way in taken[0]},
        "of_memcpy": {way: median_ratio("memcpy", way) for way in ways},
        "of_socket": {way: median_ratio("socket", way) for way in ways},
        "checksum_share": {way: round(1 / median_ratio(way, "checksum"), 3) for way in ways},
        "share_inside_mooncake": {
            way: round(1 / median_ratio(f"mooncake {way}", f"inside mooncake {way}"), 3) for way in ("put", "get")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16,64,256", help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-benchmark-", dir="/dev/shm") as base:
        sizes = [measure(int(size), options.rounds, Path(base)) for size in options.sizes.split(",")]
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "rounds": options.rounds,
        "objects": sizes,
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    for one in sizes:
        print(json.dumps(one))


if __name__ == "__main__":
    run_main(main)
