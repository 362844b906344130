"""The databases of a stack: restarted when they crash, stopped in order."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from benchmarks.postgres import kill
from infra.files.atomic import write_atomically
from infra.network.ports import lasting_ports
from infra.processes.process import Owner, ProcessFailedError
from infra.refusal import Refusal
from infra.servers.postgres import NOBODY, PostgresServer
from infra.servers.s3 import PARTS, S3Access, S3Server
from infra.servers.stack import Stack

WAIT_S = 240.0


@pytest.fixture
def owner(public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    for server in ("postgres", "s3"):
        monkeypatch.setattr(f"infra.servers.{server}.START_S", WAIT_S)  # a busy machine
    return Owner("tests", public_folder / "logs")


@pytest.fixture
def postgres_server(public_folder: Path, owner: Owner) -> Iterator[PostgresServer]:
    server = PostgresServer(public_folder / "postgres", owner)
    yield server
    server.stop()


def tend_until_said(stack: Stack, what: str) -> None:
    said: list[str] = []
    deadline = time.monotonic() + WAIT_S
    while not any(what in line for line in said):
        assert time.monotonic() < deadline, said
        stack.tend(said.append)
        time.sleep(0.05)


def test_a_database_whose_restart_fails_is_restarted_again(
    public_folder: Path, owner: Owner, postgres_server: PostgresServer
) -> None:
    settings = public_folder / "postgres" / "data" / "postgresql.conf"
    good = settings.read_text()
    with closing(Stack(public_folder, owner, threading.Event())) as stack:
        stack.keep_store(postgres_server)
        settings.write_text("no such setting\n")
        kill(postgres_server)
        tend_until_said(stack, "restart 2 of 5")
        settings.write_text(good)
        deadline = time.monotonic() + WAIT_S
        while postgres_server.trouble() is not None:
            assert time.monotonic() < deadline
            stack.tend(print)
            time.sleep(0.05)


def test_a_stack_stops_its_database_without_waiting_for_clients(
    public_folder: Path, owner: Owner, postgres_server: PostgresServer
) -> None:
    stack = Stack(public_folder, owner, threading.Event())
    stack.keep_store(postgres_server)
    stack.close()
    log = postgres_server.process.log.read_text()
    assert "received fast shutdown request" in log
    assert "received smart shutdown request" not in log


@pytest.mark.slow
def test_a_stack_leaves_no_socket_of_its_object_store(public_folder: Path, owner: Owner) -> None:
    stack, server = Stack(public_folder, owner, threading.Event()), S3Server(public_folder / "s3", owner)
    stack.keep_store(server)
    stack.close()
    ports = server.access.ports.values()
    assert [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")] == []


def test_another_program_at_a_port_of_the_object_store_is_refused(tmp_path: Path, owner: Owner) -> None:
    """It took the port while the stack was down, and may answer as the store does."""
    names = [*PARTS, *(f"{part}-grpc" for part in PARTS)]
    ports = dict(zip(names, lasting_ports(len(names)), strict=True))
    file = tmp_path / "s3" / "access.json"
    write_atomically(file, S3Access(access_key="key", secret_key="secret", ports=ports))
    with socket.create_server(("127.0.0.1", ports["s3"])):
        with pytest.raises(Refusal, match=rf"another program listens at port {ports['s3']}.*{file}"):
            S3Server(tmp_path / "s3", owner)
    assert not (owner.logs / "s3.log").exists()


def test_a_database_starts_although_another_program_has_its_old_process_id(
    public_folder: Path, postgres_server: PostgresServer
) -> None:
    """After a power cut `postmaster.pid` stays, and its process id may be that of any program of the same user."""
    file = public_folder / "postgres" / "data" / "postmaster.pid"
    first, *rest = file.read_text().splitlines(keepends=True)
    kill(postgres_server)
    with subprocess.Popen(["sleep", "600"], user=NOBODY if os.getuid() == 0 else None) as other:
        file.write_text("".join([first.replace(first.strip(), str(other.pid)), *rest]))
        postgres_server.start()
        other.kill()


def test_a_second_server_of_a_folder_is_refused(postgres_server: PostgresServer) -> None:
    """A living one is noticed although its `postmaster.pid` is removed."""
    living, postgres_server.port = postgres_server.process, lasting_ports(1)[0]
    try:
        with pytest.raises(ProcessFailedError, match="pre-existing shared memory block"):
            postgres_server.launch().wait(WAIT_S)
    finally:
        postgres_server.process = living


def test_a_database_dies_with_its_supervisor(postgres_server: PostgresServer) -> None:
    (postmaster,) = psutil.Process(postgres_server.process.pid).children()
    os.kill(postgres_server.process.pid, signal.SIGKILL)
    postmaster.wait(WAIT_S)
