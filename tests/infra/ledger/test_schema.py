import sqlite3
from contextlib import nullcontext
from pathlib import Path

import pytest
import sqlalchemy as sa

from benchmarks.postgres import kill
from infra.ledger import database
from infra.ledger.database import check_server, refuse_network_file_system
from infra.ledger.ledger import Ledger
from infra.network.ports import HOST, lasting_ports
from infra.records.data_path import SampleProgress
from infra.refusal import Refusal
from infra.servers.postgres import PostgresServer


def test_sqlite_is_durable_and_writers_start_with_the_lock(sqlite_url: str) -> None:
    with Ledger.open(sqlite_url, "run") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        check_locks(ledger, sqlite_url)


def check_locks(ledger: Ledger, url: str) -> None:
    with ledger._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000
    with sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0) as other:
        with ledger.write():
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
        with ledger.read():
            other.execute("BEGIN IMMEDIATE")
            other.rollback()
    other.close()


def test_a_lost_connection_is_made_anew(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SERVER_S", 1.0)
    with Ledger.open(postgres.make_database("lost"), "run") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        kill(postgres)
        with pytest.raises(sa.exc.OperationalError, match="refused"):
            ledger.progress()
        monkeypatch.undo()
        postgres.start()
        assert ledger.progress() == SampleProgress()


def test_a_session_keeps_nothing_of_a_transaction(postgres: PostgresServer) -> None:
    """A transaction pooler lends one session to several applications in turn."""
    with Ledger.open(postgres.make_database("pooled"), "run") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        for _ in range(10):
            ledger.progress()
        with ledger.write() as (rows, _):
            assert rows.connection.exec_driver_sql("SHOW statement_timeout").scalar() == "5min"
        session = ledger._engine.raw_connection()
        try:
            cursor = session.cursor()
            found = []
            for asked in ("SHOW statement_timeout", "SHOW lock_timeout", "SELECT count(*) FROM pg_prepared_statements"):
                cursor.execute(asked)
                found += cursor.fetchone() or ()
        finally:
            session.close()
    assert found == ["0", "0", 0]


@pytest.mark.parametrize(("folder", "refused"), [("local", False), ("share", True), ("share/with space", False)])
def test_network_file_system(tmp_path: Path, folder: str, refused: bool) -> None:
    (tmp_path / "share" / "with space").mkdir(parents=True)
    (tmp_path / "local").mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(tmp_path / "share/with space").replace(" ", "\\040")
    mounts.write_text(
        f"disk / ext4 rw 0 0\nserver:/x {tmp_path}/share nfs4 rw 0 0\ndisk {escaped} ext4 rw 0 0\n"
        f"server:/y {tmp_path}/sha nfs4 rw 0 0\n"
    )
    file = tmp_path / folder / "ledger.sqlite"
    if refused:
        with pytest.raises(ValueError, match=rf"nfs4 at {tmp_path}/share.*ledger\.url"):
            refuse_network_file_system(file, mounts)
    else:
        refuse_network_file_system(file, mounts)


@pytest.mark.parametrize(
    ("folder", "kind", "refused"),
    [
        ("größe", "nfs4", True),
        ("a", "virtiofs", True),
        ("a", "fuse.ceph-fuse", True),
        ("a", "fuse.unheard-of", True),
        ("a", "fuse.fuse-overlayfs", False),
        ("a", "fuseblk", False),
    ],
)
def test_file_systems_of_networks(folder: str, kind: str, refused: bool, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nx {tmp_path / folder} {kind} rw 0 0\n")
    (tmp_path / folder).mkdir()
    with pytest.raises(ValueError, match=kind) if refused else nullcontext():
        refuse_network_file_system(tmp_path / folder / "ledger.sqlite", mounts)


def test_network_file_system_is_not_checked_without_a_mount_table(tmp_path: Path) -> None:
    refuse_network_file_system(tmp_path / "ledger.sqlite", tmp_path / "absent")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/db", "must name a SQLite file"),
        ("sqlite://", "must name a SQLite file"),
        ("nonsense", "no database URL"),
        ("sqlite:////nowhere/at/all.sqlite", "does not exist"),
    ],
)
def test_unusable_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ledger.open(url, "run")
    with pytest.raises(ValueError, match=message):
        check_server(url)


def test_a_server_that_does_not_answer_is_refused_before_a_run() -> None:
    with pytest.raises(ValueError, match=r"does not let us in: .*Start the server, correct the URL"):
        check_server(f"postgresql+psycopg://nobody@{HOST}:{lasting_ports(1)[0]}/none")


def test_tables_of_another_version_are_refused_before_a_run(url: str) -> None:
    """Nothing changes the tables that are there, so a column would be missed only by the first lease."""
    Ledger.open(url, "run").close()
    check_server(url)
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("ALTER TABLE samples DROP COLUMN answer")
    for attempt in (check_server, lambda url: Ledger.open(url, "run")):
        with pytest.raises(Refusal, match=r"^the ledger .*another version of .* table samples has other"):
            attempt(url)
