"""The ledger's database: a SQLite file or PostgreSQL, and what is done when it is locked, away or damaged."""

import os
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from infra.files.locks import hold
from infra.files.sqlite_file import PRIMARY, is_other_file
from infra.ledger.schema import metadata
from infra.ledger.server_rights import refuse_unusable_database
from infra.refusal import Refusal, first_line
from infra.waiting import wait_while

BUSY_TIMEOUT_S = 60
"""How long SQLite waits for another process's transaction."""
LOCKED_S = 600.0
"""How long a process waits for a SQLite file that another program keeps locked, a backup for instance."""

POSTGRESQL = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    # A transaction pooler gives each transaction another session, which does not know the statements of the last one.
    "prepare_threshold": None,
    # Of a database without an encoding the driver would give bytes.
    "client_encoding": "utf8",
}
"""libpq's and the driver's settings: a server that vanished is given up within half a minute."""

TRANSACTION = {
    # A client that freezes inside a transaction holds the run's row: its session is ended, and the lock with it.
    "idle_in_transaction_session_timeout": 30_000,
    # Longer than that, or those who wait for a frozen client would give up before it is gone.
    "lock_timeout": 120_000,
    "statement_timeout": 300_000,
    # In seconds: a client whose machine has vanished is given up too.
    "tcp_keepalives_idle": 10,
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 3,
}
"""Settings of every PostgreSQL transaction, in milliseconds unless noted. Set for a session they would reach, through a
transaction pooler, other applications."""

DRIVER = "postgresql+psycopg"
SERVER_S = 30.0
"""How long a server that does not answer is waited for: it may be restarting."""

LOOKS_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def _database(url: str) -> sa.URL:
    """The address of a ledger. Raises Refusal for one of another database, or of none."""
    remedy = "write sqlite:////absolute/path.sqlite or postgresql://user@host/database"
    try:
        address = sa.make_url(url)
        backend = address.get_backend_name()
    except (ArgumentError, ValueError) as error:
        raise Refusal(f"ledger.url {url!r} is no database URL: {remedy}") from error
    if backend == "postgresql":
        return address.set(drivername=DRIVER)
    if backend == "sqlite" and address.database not in (None, "", ":memory:"):
        if address.get_driver_name() != "pysqlite" or address.query:
            raise Refusal(f"ledger.url {url!r} asks for a driver or options that the ledger does not use: {remedy}")
        return address
    raise Refusal(f"ledger.url {url!r} must name a SQLite file or PostgreSQL: {remedy}")


def open_engine(url: str) -> sa.Engine:
    """Connect to a ledger's database, making its tables where they are missing.

    Raises Refusal for a URL of another database, for a missing folder, for a SQLite file on a network file system,
    for a file that is no database, and for tables of another version. Connections that carry the execution option
    `reads=True` take no write lock.
    """
    address = _database(url)
    if address.get_backend_name() == "postgresql":
        engine = _postgresql_engine(address)
    else:
        engine = _sqlite_engine(address, Path(str(address.database)))
    with engine.begin() as connection:
        lock_schema(connection)
        _refuse_other_version(connection)
        metadata.create_all(connection)
    return engine


def check_server(url: str) -> None:
    """Raise Refusal, with the reason, where `url` names no database that a ledger of this version could be in."""
    address = _database(url)
    if address.get_backend_name() == "sqlite":
        file = Path(str(address.database))
        _check_sqlite(file)
        if file.exists():
            with sa.create_engine(address, connect_args={"timeout": BUSY_TIMEOUT_S}).connect() as connection:
                _refuse_other_version(connection)
        return
    try:
        with sa.create_engine(address, connect_args=POSTGRESQL, poolclass=sa.NullPool).connect() as connection:
            refuse_unusable_database(connection)
            _refuse_other_version(connection)
    except Refusal:
        raise
    except OperationalError as error:
        raise Refusal(
            f"ledger.url: {address.render_as_string()} does not let us in: {first_line(error.orig or error)}. Start "
            "the server, correct the URL, or set $PGPASSWORD; without one the ledger is a file in the run folder"
        ) from error
    except (SQLAlchemyError, ValueError) as error:
        raise Refusal(f"ledger.url {url!r} cannot be used: {error}. Correct it, or leave it out") from error


def _refuse_other_version(connection: sa.Connection) -> None:
    """Raise Refusal where a table of the ledger's names has other columns: none is ever changed, only made."""
    found = sa.inspect(connection).get_multi_columns(filter_names=list(metadata.tables))
    for (_, name), columns in found.items():
        expected = set(metadata.tables[name].columns.keys())
        if {column["name"] for column in columns} != expected:
            raise Refusal(
                f"the ledger {connection.engine.url.render_as_string()} was made by another version of Draftsmith, or "
                f"by another program: its table {name} has other columns. Finish its runs with that version and drop "
                f"{', '.join(sorted(metadata.tables))}, or name another database in ledger.url; a run whose ledger is "
                "a file in its folder cannot be resumed with this version"
            )


def _postgresql_engine(address: sa.URL) -> sa.Engine:
    # A connection that was lost is noticed, and made anew, before a transaction begins on it.
    engine = sa.create_engine(address, pool_pre_ping=True, connect_args=POSTGRESQL)
    event.listen(engine, "do_connect", _connect_when_there)
    event.listen(engine, "begin", _begin_postgresql)
    return engine


def _connect_when_there(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    """A connection to a server that may be restarting. Raises the driver's OperationalError when it does not come."""
    where = f"{options.get('host', 'localhost')}:{options.get('port', 5432)}"
    reason = f"the ledger's database at {where} does not answer"
    refused = (dialect.loaded_dbapi.OperationalError,)
    return wait_while(lambda _: True, lambda: dialect.connect(*arguments, **options), reason, SERVER_S, refused)


def _begin_postgresql(connection: sa.Connection) -> None:
    # Without parameters the driver sends all of them at once.
    connection.exec_driver_sql("; ".join(f"SET LOCAL {name} = {value}" for name, value in TRANSACTION.items()))


def lock_schema(connection: sa.Connection) -> None:
    """Let one process at a time make tables or runs (on SQLite every write transaction already is alone)."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(710251)"))


def _sqlite_engine(address: sa.URL, file: Path) -> sa.Engine:
    _check_sqlite(file)
    _write_ahead(file)
    engine = sa.create_engine(address, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _check_sqlite(file: Path) -> None:
    """Raise Refusal for a file that SQLite cannot open or that is not a database."""
    if not file.parent.is_dir():
        raise Refusal(f"the ledger's folder {file.parent} does not exist: create it, or set ledger.url")
    if file.exists() and not file.is_file():
        raise Refusal(f"the ledger {file} is no file: remove it, or set ledger.url")
    if file.is_file() and is_other_file(file):
        raise Refusal(f"the ledger {file} is damaged, no SQLite database: restore it, or move it away")
    refuse_network_file_system(file)


def _write_ahead(file: Path) -> None:
    """Switch a new file to the write-ahead log for good; of two that try at once SQLite refuses one without waiting."""
    with hold(file.with_name(f"{file.name}.lock"), wait_s=BUSY_TIMEOUT_S):
        with closing(sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")


def _set_up_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # the driver would start transactions itself, and too late
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: sa.Connection) -> None:
    def is_busy(error: Exception) -> bool:
        # Nothing has begun, so nothing is lost by asking again.
        return getattr(getattr(error, "orig", None), "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY

    reads = connection.get_execution_options().get("reads", False)
    wait_while(
        is_busy,
        lambda: connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE"),
        f"the ledger {connection.engine.url.database} is locked by another program",
        LOCKED_S,
        (OperationalError,),
    )


# fmt: off
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "virtiofs", "vboxsf", "afs", "ceph", "lustre", "gpfs",
    "beegfs", "glusterfs", "wekafs", "ocfs2", "gfs2", "panfs", "orangefs", "pvfs2", "coda",
})
LOCAL_FUSE = frozenset({
    "fuse.fuse-overlayfs", "fuse.ext2", "fuse.fuse-ext2", "fuse.ext4", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat",
    "fuse.zfs", "fuse.gocryptfs", "fuse.encfs", "fuse.securefs",
})
"""Most others are network file systems, of which there are ever new ones."""
# fmt: on


def refuse_network_file_system(file: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Raise Refusal when `file` would lie on a network file system; silent where `mounts` does not exist.

    SQLite's write-ahead log needs memory and locks that all processes share, which such file systems do not give.
    """
    if not mounts.exists():
        return
    folder = file.parent.resolve()
    found, kind = Path(), ""
    for line in mounts.read_bytes().splitlines():
        _, point, fs_type, *_ = line.split(b" ")
        # Spaces and the like are octal escapes, all else are the name's own bytes.
        place = Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), point)))
        if folder.is_relative_to(place) and len(place.parts) >= len(found.parts):
            found, kind = place, fs_type.decode()
    if kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in LOCAL_FUSE):
        raise Refusal(
            f"the SQLite ledger {file} lies on a network file system ({kind} at {found}), where SQLite is not safe: "
            "put the run folder on a local disk, or set ledger.url to a PostgreSQL database"
        )


def set_aside_if_damaged(file: Path) -> Path | None:
    """Rename a damaged ledger, with its write-ahead log; its new name, or None for a whole or missing one.

    The trainer then finds an empty ledger and rebuilds it from the newest checkpoint. A damaged file that is read on
    could give wrong answers: SQLite notices damage only where it happens to look.
    """
    if not file.is_file() or _is_whole(file):
        return None
    aside = file.with_name(f"{file.name}.damaged-{time.time_ns()}")
    # The file first: without it, its log means nothing.
    for suffix in ("", "-wal", "-shm"):
        part = file.with_name(file.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def _is_whole(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)) as connection:
            return connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & PRIMARY in LOOKS_DAMAGED:
            return False
        raise
