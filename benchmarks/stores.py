"""One, two and three store processes under one Mooncake master, each on a machine of its own: speed, memory, placement.

    python benchmarks/stores.py [--rate 400] [--json ...]

Machines are network namespaces on one bridge: three for generators, three for trainer ranks, one for the flow and the
master. Every machine's link carries `--rate` Mbit/s each way, so that links and not this computer's cores are the
limit; with `--rate 0` it is the cores. Needs root.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from machine import cpu_model
from two_hosts import ip, on

from infra.config import TransportConfig
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.pools.base import LocalCommand
from infra.pools.local import LocalPool
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.records.data_path import ObjectRecord, StoreRecord
from infra.transport.base import READER
from infra.transport.mooncake.store import start_store
from infra.transport.mooncake.transport import MooncakeTransport

RESULT = Path(__file__).parent / "results" / "stores.json"
MIB = 2**20
SIZE, COUNT, MACHINES, ROUNDS = 8 * MIB, 6, 3, 2
"""Bytes of an object, objects of each writer, machines on either side, repetitions."""
FLOW = "10.78.0.1"
WAIT_S = 300.0


@contextmanager
def machines(names: Sequence[str], rate: int) -> Iterator[None]:
    """Namespaces 10.78.0.1, .2, ... whose links, of `rate` Mbit/s each way, meet at a bridge."""
    bridge = f"{names[0]}-bridge"
    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("-n", bridge, "link", "add", f"p{number}", "type", "veth", "peer", "name", "e0", "netns", name)
            ip("-n", bridge, "link", "set", f"p{number}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.78.0.{number}/24", "dev", "e0")
            for device in ("e0", "lo"):
                ip("-n", name, "link", "set", device, "up")
            if rate:
                for place, device in ((name, "e0"), (bridge, f"p{number}")):
                    limit = ["tbf", "rate", f"{rate}mbit", "burst", "1mb", "latency", "50ms"]
                    subprocess.run(
                        on(place, ["tc", "qdisc", "add", "dev", device, "root", *limit]), check=True, timeout=30
                    )
        yield
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=30, stderr=subprocess.DEVNULL)


class MachinesPool(LocalPool):
    """Parts on the trainer's machines."""

    def _place(self, command: Sequence[str], processes: int, index: int | None) -> LocalCommand:
        return LocalCommand(on(f"{os.environ['DRIVEN']}-t{index}", list(command)), 1)


def work(what: str, record: Path, mine: int, near: bool) -> None:
    """A writer or reader: gets ready, waits for a line, works, says that it has, and ends at another line.

    Writer i writes objects for all readers in turn, beginning with its own number; `near` puts them on the reader's
    machine, if that holds a part of the store.
    """
    store = StoreRecord.read(record)
    transport = MooncakeTransport(store)
    if what == "put":
        data = os.urandom(SIZE)
        keys = [f"run/{mine}/{(mine + turn) % COUNT}/1" for turn in range(COUNT)]
        addresses = [f"{key}{READER}{int(key.split('/')[2]) % MACHINES % store.parts}" if near else key for key in keys]
        transport.delete(transport.put(f"run/{mine}/warm/1", {"aux": data}).key)
        tell("ready")
        for key, address in zip(keys, addresses, strict=True):
            write_atomically(place(record, key), transport.put(address, {"aux": data}))
        tell("done")
    else:
        into = memoryview(bytearray(SIZE))
        keys = [f"run/{writer}/{index}/1" for writer in range(MACHINES) for index in range(mine, COUNT, MACHINES)]
        objects = [ObjectRecord.read(place(record, key)) for key in keys]
        transport.get(objects[0], {"aux": into})
        tell("ready")
        for one in objects:
            transport.get(one, {"aux": into})
        tell("done")
        for one in objects:
            transport.delete(one.key)


def place(record: Path, key: str) -> Path:
    return record.with_name(f"{key.replace('/', '+')}.json")


def tell(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


def together(what: str, record: Path, near: bool) -> float:
    """Seconds until all writers, or all readers, have done their part."""
    side = "g" if what == "put" else "t"
    with ExitStack() as stack:
        processes = []
        for index in range(MACHINES):
            command = [sys.executable, __file__, "--work", what, str(record), str(index), *(["--near"] if near else [])]
            name = f"{os.environ['DRIVEN']}-{side}{index}"
            processes.append(
                subprocess.Popen(on(name, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(processes[-1].kill)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        begun = time.perf_counter()
        for process in processes:
            go(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
        seconds = time.perf_counter() - begun
        for process in processes:
            go(process)
            assert process.wait(WAIT_S) == 0
        return seconds


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def drive(parts: int) -> None:
    """On the flow's machine: start the store, and have it written and read."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="stores-") as folder, ExitStack() as stack:
        run = RunFolder(Path(folder) / "run")
        run.path.mkdir()
        owner = Owner("stores", run.logs)
        config = TransportConfig(kind="mooncake", budget_mib=192, address=FLOW)
        pool = MachinesPool(owner)
        stack.enter_context(
            start_store(LocalPool(owner), run, config, Path(folder), lambda _line: None, holders=pool, parts=parts)
        )
        moved = MACHINES * COUNT * SIZE / MIB
        found: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for near in (False, True):
                where = "near" if near else "anywhere"
                found.setdefault(f"put {where}", []).append(moved / together("put", run.store, near))
                found.setdefault(f"get {where}", []).append(moved / together("get", run.store, near))
        record = StoreRecord.read(run.store)
        speeds = {name: round(median(rates), 1) for name, rates in found.items()}
        print(json.dumps({"mib_per_s": speeds, "memory_mib": record.nbytes * record.parts // MIB}))


def measured(rate: int) -> dict[str, object]:
    names = [f"stores-{os.getpid()}-{side}" for side in ("f", *(f"{s}{i}" for s in "gt" for i in range(MACHINES)))]
    prefix = f"stores-{os.getpid()}"
    result = {}
    with machines(names, rate):
        for parts in range(1, MACHINES + 1):
            command = on(names[0], [sys.executable, __file__, "--drive", str(parts)])
            ended = subprocess.run(
                command, env=os.environ | {"DRIVEN": prefix}, check=True, stdout=subprocess.PIPE, text=True, timeout=900
            )
            result[str(parts)] = json.loads(ended.stdout.splitlines()[-1])
            print(parts, result[str(parts)], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, nargs="+", default=[400, 0])
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--drive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--near", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        what, record, mine = options.work
        work(what, Path(record), int(mine), options.near)
    elif options.drive:
        drive(options.drive)
    else:
        conditions = {
            "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
            "object_mib": SIZE // MIB, "writers": MACHINES, "readers": MACHINES, "rounds": ROUNDS,
        }  # fmt: skip
        by_rate = {str(rate): measured(rate) for rate in options.rate}
        write_atomically(options.json, json.dumps({**conditions, "by_link_mbit_and_stores": by_rate}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
