"""A PostgreSQL that cannot be made."""

from pathlib import Path

import pytest

from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.servers.postgres import PostgresServer


def test_a_database_that_cannot_be_made_is_refused_with_what_initdb_says(public_folder: Path) -> None:
    (public_folder / "postgres").mkdir()
    (public_folder / "postgres" / "data").symlink_to("/nowhere/data")
    with pytest.raises(Refusal, match=r"initdb cannot make .*postgres/data \(.+\): run this as a user whom"):
        PostgresServer(public_folder / "postgres", Owner("tests", public_folder / "logs"))


def test_root_s_server_is_refused_a_link_into_a_folder_that_nobody_may_enter(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    closed = public_folder / "closed"
    (closed / "runs").mkdir(parents=True)
    closed.chmod(0o700)
    (public_folder / "runs").symlink_to(closed / "runs")
    with pytest.raises(Refusal, match=f"as nobody it may not enter {closed}:"):
        PostgresServer(public_folder / "runs" / "postgres", Owner("tests", public_folder / "logs"))
