"""SQLite files that another user has made in a folder of ours."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.doctor import network
from infra.files.sqlite_file import check_writable
from infra.refusal import Refusal
from infra.servers import local
from infra.servers.postgres import NOBODY
from infra.user import user_name


@contextmanager
def as_another_user() -> Iterator[None]:
    """As nobody where this user is root, whom no mode keeps from writing."""
    is_root = os.getuid() == 0
    if is_root:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_database_that_the_user_may_not_write_is_refused(suffix: str, public_folder: Path) -> None:
    database = public_folder / "mlflow.db"
    public_folder.chmod(0o777)
    check_writable(database)
    for name in ("", "-wal", "-shm"):
        (public_folder / f"mlflow.db{name}").touch(0o666)
        (public_folder / f"mlflow.db{name}").chmod(0o666)
    denied = public_folder / f"mlflow.db{suffix}"
    denied.chmod(0o444)
    with as_another_user():
        remedy = "chmod u\\+w" if denied.owner() == user_name() else f"sudo chown {user_name()}"
        message = rf"{denied} belongs to {denied.owner()}, .* {remedy} {denied}$"
        with pytest.raises(Refusal, match=message):
            check_writable(database)
        finding = network.mlflow(f"sqlite:///{database}")
    assert (finding.verdict, finding.remedy.endswith(f"{denied}")) == ("problem", True)
    denied.chmod(0o666)
    with as_another_user():
        check_writable(database)


def test_pages_over_a_database_of_another_user_are_refused(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's and MLflow's servers would end after pages of output."""
    monkeypatch.setenv("PREFECT_HOME", str(public_folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{public_folder / 'mlflow.db'}")
    public_folder.chmod(0o777)
    owner = local.Owner("pages", public_folder / "logs")
    for name in ("prefect.db", "mlflow.db"):
        (public_folder / name).touch()
        (public_folder / name).chmod(0o444)
    with as_another_user():
        with pytest.raises(Refusal, match=r"prefect\.db belongs to"):
            local.start_prefect(owner, 9, "a:b")
        with pytest.raises(Refusal, match=r"mlflow\.db belongs to"):
            local.start_mlflow(owner, 9)
        assert network.prefect(None).verdict == "problem"
    assert not owner.logs.exists()
