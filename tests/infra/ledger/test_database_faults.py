"""A database that is frozen, restarted or locked by somebody else: nobody is blocked for ever, and nothing is lost."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from benchmarks.postgres import kill
from infra import waiting
from infra.ledger import database
from infra.ledger.ledger import Ledger
from infra.ledger.schema import runs
from infra.ledger.trainers import resume_run
from infra.processes.process import Owner
from infra.records.data_path import SampleSlot
from infra.servers.postgres import PostgresServer

SLOTS = [SampleSlot(ordinal=i, sample=i, tokens=1) for i in range(4)]
FROZEN = """
import sys
from sqlalchemy.exc import DBAPIError
from infra.ledger.ledger import Ledger

ledger = Ledger.open(sys.argv[1], "run")
try:
    with ledger.write() as (rows, _):
        # Of this transaction alone: on a busy machine a client may be idle in any other for a second.
        rows.connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 1000")
        print("inside", flush=True)
        sys.stdin.readline()
        rows.connection.exec_driver_sql("SELECT 1")
except DBAPIError as error:
    print("lost:", error.orig, flush=True)
print("leased", [lease.ordinal for lease in ledger.lease("frozen", 1)], flush=True)
"""


def filled(url: str) -> Ledger:
    ledger = Ledger.open(url, "run")
    ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=3600, max_attempts=2, order="strict")
    ledger.open_epoch(None, 0, SLOTS)
    return ledger


def test_a_client_that_is_frozen_inside_a_transaction_blocks_nobody(postgres: PostgresServer) -> None:
    """The server ends its session; once continued, the client gets an error and reconnects."""
    url = postgres.make_database(uuid.uuid4().hex)
    with filled(url) as ledger, ThreadPoolExecutor(1) as thread:
        command = [sys.executable, "-c", FROZEN, url]
        frozen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert frozen.stdout is not None
            assert frozen.stdout.readline() == "inside\n"
            os.kill(frozen.pid, signal.SIGSTOP)
            leases = thread.submit(ledger.lease, "other", 1)
            assert [lease.ordinal for lease in leases.result(120)] == [0]
            os.kill(frozen.pid, signal.SIGCONT)
            output, _ = frozen.communicate("go on\n", timeout=120)
        finally:
            frozen.kill()
        lost, leased = output.splitlines()[-2:]
        assert "idle-in-transaction timeout" in output
        assert lost.startswith("lost:") or "lost:" in output
        assert leased == "leased [1]"


def test_every_transaction_has_bounds(postgres: PostgresServer) -> None:
    with filled(postgres.make_database(uuid.uuid4().hex)) as ledger, ledger.read() as rows:
        for name, milliseconds in database.TRANSACTION.items():
            shown = sa.text("SELECT setting FROM pg_settings WHERE name = :name")
            assert int(rows.connection.execute(shown, {"name": name}).scalar_one()) == milliseconds


@pytest.fixture
def own_postgres(public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresServer]:
    monkeypatch.setattr("infra.servers.postgres.START_S", 240.0)  # a busy machine
    server = PostgresServer(public_folder / "postgres", Owner("tests", public_folder / "logs"))
    yield server
    server.stop()


def test_a_database_that_is_restarted_is_waited_for(
    own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """It comes back once somebody waits for it, and not before."""

    def come_back(seconds: float) -> None:
        if own_postgres.process.poll() is None:
            time.sleep(seconds)
        else:
            own_postgres.start()

    monkeypatch.setattr(database, "SERVER_S", 240.0)
    with filled(own_postgres.make_database("ledger")) as ledger:
        kill(own_postgres)
        monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=time.monotonic, sleep=come_back))
        assert [lease.ordinal for lease in ledger.lease("g", 1)] == [0]
        said = capsys.readouterr().out
        assert f"the ledger's database at {own_postgres.host}:{own_postgres.port} does not answer" in said


@pytest.fixture
def locked(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ledger, Callable[[], None]]]:
    """A ledger whose file another program has locked, and what ends that."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)
    with filled(sqlite_url) as ledger:
        other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        yield ledger, lambda: other.execute("ROLLBACK") and None
        other.close()


def test_a_file_that_is_locked_for_longer_than_sqlite_waits_is_waited_for(
    locked: tuple[Ledger, Callable[[], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The other program lets go once SQLite has given up, and not before."""
    ledger, unlock = locked
    event.listen(ledger._engine, "handle_error", lambda _: unlock(), once=True)
    assert [lease.ordinal for lease in ledger.lease("g", 1)] == [0]
    said = capsys.readouterr().out
    assert re.search(r"waiting up to 600 s: the ledger .*ledger.sqlite is locked by another program", said)


def test_the_wait_for_a_locked_file_ends(
    locked: tuple[Ledger, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCKED_S", 0.5)
    with pytest.raises(OperationalError, match="database is locked"):
        locked[0].lease("g", 1)


def test_a_fault_of_the_machine_is_no_crash_of_the_trainer(sqlite_url: str) -> None:
    with filled(sqlite_url) as ledger:
        for _ in range(5):
            incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
            ledger.excuse(incarnation)
        with ledger.read() as rows:
            assert rows.scalar(sa.select(runs.c.crashes)) == 0
