"""`draftsmith up` and `down`: a whole stack on this machine, on loopback: servers, databases, S3, workers.

Everything runs under supervisors of `up`'s process: stopped, killed or crashed, it leaves nothing behind.
"""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.files.locks import LockHeldError, hold
from infra.network.ports import free_port
from infra.processes.exit import told_to_stop
from infra.refusal import Refusal
from infra.servers.local import MLFLOW_PORT, PREFECT_PORT
from infra.settings import runs_folder

if TYPE_CHECKING:
    from infra.servers.stack import StackPorts

POLL_S = 0.3
START_S = 600.0
STOP_S = 120.0


def up(
    background: Annotated[bool, typer.Option("--background", help="Return once everything answers.")] = False,
    prefect_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 4200, or the next free.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 5000, or the next free.")] = None,
) -> None:
    """Start Prefect, MLflow, PostgreSQL, S3 and workers on this machine, with the deployments of prefect.yaml."""
    if not Path("prefect.yaml").is_file():
        raise Refusal(f"there is no prefect.yaml in {Path.cwd()}: run this in the project's folder")
    folder = runs_folder() / ".stack"
    if background:
        _start_in_background(folder, prefect_port, mlflow_port)
        return
    from infra.processes.process import Owner
    from infra.servers.stack import StackPorts, stack, write_environment

    with ExitStack() as running:
        stop = running.enter_context(told_to_stop())
        try:
            lock = running.enter_context(hold(folder / "lock", wait_s=1.0))
        except LockHeldError:
            raise Refusal(f"it is up already: {_addresses(folder)}; `draftsmith down` stops it") from None
        for note in ("stop", "addresses"):
            (folder / note).unlink(missing_ok=True)
        taken: set[int] = set()
        ports = StackPorts(
            free_port("--prefect-port", prefect_port, PREFECT_PORT, taken)[0],
            free_port("--mlflow-port", mlflow_port, MLFLOW_PORT, taken)[0],
        )
        owner = Owner("stack", folder / "logs", locks=(lock.descriptor,))
        print("starting: a minute the first time", flush=True)
        up_now = running.enter_context(stack(folder, owner, ports, _say))
        write_environment(folder / "environment", up_now.environment)
        (folder / "addresses").write_text(_where(ports))
        print(f"{_where(ports)}\n\n{_how_to_use(folder)}\nCtrl-C stops it.", flush=True)
        while not stop.wait(POLL_S) and not (folder / "stop").exists():
            up_now.tend(_say)
        print("stopping", flush=True)
    (folder / "stop").unlink(missing_ok=True)


def down() -> None:
    """Stop what `draftsmith up` started. Data stay, and interrupted runs resume with the next `up`."""
    folder = runs_folder() / ".stack"
    if not folder.is_dir():
        print(f"nothing is up: there is no {folder}")
        return
    try:
        with hold(folder / "lock"):
            print("nothing is up")
            return
    except LockHeldError:
        (folder / "stop").touch()
    try:
        with hold(folder / "lock", wait_s=STOP_S):
            print("everything is down")
    except LockHeldError:
        raise Refusal(f"it did not stop within {STOP_S:g} s: look at {folder / 'logs'}") from None


def _start_in_background(folder: Path, prefect_port: int | None, mlflow_port: int | None) -> None:
    """Start `draftsmith up` in its own session, and wait until it prints the addresses."""
    command = [sys.executable, "-c", "from flows.command_line import main; main()", "up"]
    for option, port in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port)):
        command += [option, str(port)] if port else []
    folder.mkdir(parents=True, exist_ok=True)
    log, addresses = folder / "up.log", folder / "addresses"
    before = addresses.stat().st_mtime_ns if addresses.is_file() else 0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while not addresses.is_file() or addresses.stat().st_mtime_ns == before:
        if process.poll() is not None:
            _, _, said = log.read_text().strip().rpartition("error: ")
            raise Refusal(said)
        if time.monotonic() > deadline:
            raise Refusal(f"it is not up after {START_S:g} s: look at {log}")
        time.sleep(POLL_S)
    print(f"{addresses.read_text()}\n\n{_how_to_use(folder)}\n`draftsmith down` stops it.")


def _how_to_use(folder: Path) -> str:
    return (
        f"Prefect's page asks once for a credential: it is in {folder / 'prefect-credential'}\n"
        f"Commands take it, and the addresses, after\n  source {folder / 'environment'}"
    )


def _addresses(folder: Path) -> str:
    file = folder / "addresses"
    return ", ".join(file.read_text().splitlines()) if file.is_file() else "it is still starting"


def _where(ports: "StackPorts") -> str:
    return f"Prefect  http://127.0.0.1:{ports.prefect}\nMLflow   http://127.0.0.1:{ports.mlflow}"


def _say(what: str) -> None:
    print(what, flush=True)
