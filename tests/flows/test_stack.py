"""`draftsmith up` and `down`: a whole stack that mends itself and leaves nothing."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from flows.command_line import main; main()"]
SERVERS = {"postgres", "weed", "prefect server start", "mlflow server", "prefect worker start"}


@pytest.fixture
def draftsmith(public_folder: Path) -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """The command, with run folders of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | {
        "DRAFTSMITH_RUNS": str(public_folder / "runs"),
        "PREFECT_HOME": str(public_folder / "prefect"),
        "PREFECT_SERVER_UI_ENABLED": "false",
    }

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
        )

    yield run
    run("down")


def processes(folder: Path) -> list[psutil.Process]:
    """The stack's: all that write to its logs."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(str(folder)):
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def port_of(page: str, addresses: str) -> int:
    return int(next(line for line in addresses.splitlines() if line.startswith(page)).rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_stack_mends_itself_and_leaves_nothing(
    draftsmith: Callable[..., Any], public_folder: Path, until: Callable[..., None]
) -> None:
    folder = public_folder / "runs" / ".stack"
    started = draftsmith("up", "--background")
    assert started.returncode == 0, started.stderr
    prefect, mlflow = (port_of(page, started.stdout) for page in ("Prefect", "MLflow"))
    found = httpx.post(f"http://127.0.0.1:{prefect}/api/deployments/filter", json={}, timeout=60).json()
    assert {"retrain", "recover"} <= {deployment["name"] for deployment in found}
    for kind in SERVERS:
        assert any(kind in command_line(process) for process in processes(folder)), kind
    addresses = {
        connection.laddr.ip
        for process in processes(folder)
        for connection in process.net_connections()
        if connection.status == "LISTEN"
    }
    assert addresses == {"127.0.0.1"}
    assert (folder / "environment").stat().st_mode & 0o077 == 0

    again = draftsmith("up")
    assert again.returncode == 2
    assert f"it is up already: Prefect  http://127.0.0.1:{prefect}" in again.stderr

    before = processes(folder)
    for victim in (p for p in before if "mlflow server" in command_line(p)):
        victim.kill()  # its supervisor as well: a child of the server is left
    until(lambda: new_mlflow(folder, before), "for MLflow to be started again")
    until(lambda: answers(f"http://127.0.0.1:{mlflow}/health"), "for MLflow to come back")

    assert draftsmith("down").stdout == "everything is down\n"
    until(lambda: not processes(folder), "for the last process")  # that had held the lock
    assert draftsmith("down").stdout == "nothing is up\n"


def new_mlflow(folder: Path, before: list[psutil.Process]) -> bool:
    return any("mlflow server" in command_line(process) for process in set(processes(folder)) - set(before))


def command_line(process: psutil.Process) -> str:
    """Empty once the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False
