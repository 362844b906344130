"""A ledger whose database is locked from outside, by another program or by a client of ours that has frozen."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from two_hosts import on

from faults.base import Missed, Scene

DRIVER = Path(__file__).parents[1] / "driver.py"
END_S = 60


@contextmanager
def locked_ledger(scene: Scene) -> Iterator[None]:
    """Another program, a backup for instance, holds the SQLite file's write lock."""
    if not scene.folder.ledger_file.is_file():
        raise Missed
    with closing(sqlite3.connect(scene.folder.ledger_file, timeout=END_S, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def frozen_client(scene: Scene) -> Iterator[None]:
    """A process of the run freezes in the middle of a transaction, and never goes on."""
    host = scene.ground.hosts.trainer if scene.ground.hosts else None
    command = on(host, [sys.executable, str(DRIVER), str(scene.folder.path), "--freeze-in-transaction"])
    frozen = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert frozen.stdout is not None
        if not frozen.stdout.readline():
            raise Missed
        yield
    finally:
        frozen.kill()
        frozen.wait(END_S)
