"""Processes that are killed, or stopped and continued, and networks that go away."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from two_hosts import TRAINER, ip

from faults.base import Missed, Scene, Strike
from infra.records.data_path import StoreRecord


def kill(kind: str) -> Strike:
    """SIGKILL to one process of each kind in `kind`."""

    @contextmanager
    def strike(scene: Scene) -> Iterator[None]:
        for process in scene.pick(kind):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        yield

    return strike


@contextmanager
def kill_flow(scene: Scene) -> Iterator[None]:
    """The owner of the run dies, and a fresh one resumes it."""
    scene.kill_flow()
    scene.resume()
    yield


@contextmanager
def kill_postgres(scene: Scene) -> Iterator[None]:
    """The supervisor restarts the server."""
    os.kill(_postmaster(scene), signal.SIGKILL)
    yield


def stop(kind: str) -> Strike:
    """SIGSTOP to one process of each kind in `kind`, SIGCONT when healed."""

    @contextmanager
    def strike(scene: Scene) -> Iterator[None]:
        with _stopped(scene.pick(kind)):
            yield

    return strike


@contextmanager
def stop_postgres(scene: Scene) -> Iterator[None]:
    """The server with all its processes."""
    try:
        server = psutil.Process(_postmaster(scene))
        processes = [server, *server.children(recursive=True)]
    except (psutil.NoSuchProcess, FileNotFoundError) as error:
        raise Missed from error
    with _stopped(processes):
        yield


@contextmanager
def _stopped(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _postmaster(scene: Scene) -> int:
    assert scene.ground.postgres is not None
    try:
        return int((scene.ground.postgres / "data" / "postmaster.pid").read_text().split()[0])
    except (FileNotFoundError, IndexError) as error:
        raise Missed from error


@contextmanager
def lose_interface(scene: Scene) -> Iterator[None]:
    """The cable between the hosts is pulled out."""
    hosts = scene.ground.hosts
    assert hosts is not None
    with hosts.lost_interface():
        yield


@contextmanager
def partition_store(scene: Scene) -> Iterator[None]:
    """What the generators' host sends to the store is lost without a word; on a single host, the store stands still."""
    hosts = scene.ground.hosts
    if hosts is None:
        with _stopped([*scene.pick("master"), *scene.pick("store")]):
            yield
        return
    rules = [
        ["to", TRAINER, "ipproto", "tcp", "dport", str(port), "blackhole", "priority", "10"]
        for port in _ports_of_store(scene)
    ]
    for rule in rules:
        ip("-n", hosts.generator, "rule", "add", *rule)
    try:
        yield
    finally:
        for rule in rules:
            ip("-n", hosts.generator, "rule", "delete", *rule)


def _ports_of_store(scene: Scene) -> list[int]:
    """Of its master, and of the process that holds its memory."""
    if not scene.folder.store.is_file():
        raise Missed
    record = StoreRecord.read(scene.folder.store)
    ports = {int(address.rpartition(":")[2]) for address in (record.master, record.web)}
    (holder,) = scene.pick("store")
    listed = Path(f"/proc/{holder.pid}/net/tcp").read_text()  # of its own network namespace
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{holder.pid}/fd").iterdir()}
    for line in listed.splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # 0A: listening
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)
