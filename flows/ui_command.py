"""`draftsmith ui`: Prefect's and MLflow's pages over the runs of this machine, on loopback, until Ctrl-C.

Each server runs under a supervisor: stopped, killed or crashed, this command leaves none behind.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from infra.files.locks import Lock, LockHeldError, hold
from infra.network.health import public, trouble
from infra.network.ports import HOST, free_port
from infra.processes.exit import told_to_stop
from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.servers.local import (
    ANSWER_S,
    AUTH_STRING,
    GRACE_S,
    MLFLOW_PORT,
    POLL_S,
    PREFECT_PORT,
    Server,
    new_credential,
    start_mlflow,
    start_prefect,
    wait_until_up,
)
from infra.settings import prefect_api_url, runs_folder, tracking_uri


def ui(
    prefect_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 4200, or the next free.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 5000, or the next free.")] = None,
) -> None:
    """Serve Prefect's and MLflow's pages on loopback until Ctrl-C."""
    from rich.console import Console

    prefect, mlflow = _prefect_elsewhere(prefect_port), _mlflow_elsewhere()
    if prefect and mlflow:
        _print_addresses(prefect, mlflow, "")
        return
    credential = new_credential()
    with ExitStack() as stack:
        stop = stack.enter_context(told_to_stop())
        status = stack.enter_context(Console(stderr=True).status("starting (half a minute the first time)"))
        lock = stack.enter_context(_the_only_one(runs_folder() / ".ui"))
        owner = Owner("ui", lock.path.parent, locks=(lock.descriptor,))
        ports: set[int] = set()
        if prefect is None:
            # Flows may be pointed to a server of this machine that has ended: `_prefect_elsewhere` found it silent.
            usual = urlsplit(prefect_api_url() or "").port or PREFECT_PORT
            port, note = free_port("--prefect-port", prefect_port, usual, ports)
            prefect = start_prefect(owner, port, credential, note)
            stack.callback(prefect.stop)
        if mlflow is None and not stop.is_set():
            mlflow = start_mlflow(owner, *free_port("--mlflow-port", mlflow_port, MLFLOW_PORT, ports))
            stack.callback(mlflow.stop)
        if mlflow is None or not wait_until_up([prefect, mlflow], stop):
            return
        status.stop()
        (owner.logs / "addresses").write_text(f"Prefect {prefect.address}, MLflow {mlflow.address}")
        _print_addresses(prefect, mlflow, credential)
        while not stop.wait(POLL_S):
            for server in (prefect, mlflow):
                server.check()
        print("stopping both" if prefect.process and mlflow.process else "stopping it", flush=True)


@contextmanager
def _the_only_one(folder: Path) -> Iterator[Lock]:
    """Lock the folder of the servers' logs. Raises Refusal if another `draftsmith ui` serves the same runs."""
    try:
        with hold(folder / "lock", wait_s=GRACE_S + 1) as lock:  # a killed one's servers are gone after their grace
            (folder / "addresses").unlink(missing_ok=True)
            for log in folder.glob("*.log"):
                log.unlink()
            yield lock
    except LockHeldError:
        addresses = folder / "addresses"
        shown = addresses.read_text() if addresses.is_file() else "it is still starting"
        raise Refusal(
            f"`draftsmith ui` shows the runs of {folder.parent} already: {shown}. Stop that one first to start anew"
        ) from None


def _prefect_elsewhere(port: int | None) -> Server | None:
    """The server that flows report to, if it answers; None if one has to be started."""
    url = prefect_api_url()
    if url is None or port is not None:
        return None
    why = trouble(f"{url.rstrip('/')}/health", ANSWER_S)
    if why is None:
        return Server("Prefect", public(url).rstrip("/").removesuffix("/api"), note="was running already")
    if urlsplit(url).hostname in (HOST, "localhost"):
        return None
    raise Refusal(f"PREFECT_API_URL names {public(url)}, but {why}: start that server, or unset PREFECT_API_URL")


def _mlflow_elsewhere() -> Server | None:
    uri = tracking_uri().rstrip("/")
    if not uri.startswith(("http://", "https://")):
        return None
    why = trouble(f"{uri}/health", ANSWER_S)
    if why is None:
        return Server("MLflow", public(uri), note="was running already")
    raise Refusal(
        f"MLFLOW_TRACKING_URI names {public(uri)}, but {why}: start that server, or unset MLFLOW_TRACKING_URI"
    )


def _print_addresses(prefect: Server, mlflow: Server, credential: str) -> None:
    print(f"Prefect  {prefect.address}  runs, their tasks, logs and reports")
    print(f'MLflow   {mlflow.address}  press "Model training" there: curves (Experiments), drafts (Model registry)')
    for server in (prefect, mlflow):
        if server.note:
            print(f"{server.name} {server.note}.")
    if prefect.process:
        print(f"\nPrefect's page asks once for a credential: {credential}")
        print("Runs show up as they are; they start sooner and report straight to this server after")
        print(f"  export PREFECT_API_URL={prefect.address}/api {AUTH_STRING}={credential}")
    if prefect.process or mlflow.process:
        print("\nCtrl-C stops what was started here.", flush=True)
