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
