"""Prefect's and MLflow's servers on loopback, each under a supervisor."""

import atexit
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.files.folders import make_folder
from infra.files.sqlite_file import check_writable
from infra.network.health import trouble
from infra.network.ports import HOST, reserved_port
from infra.processes.process import Owner, Process, module, start
from infra.refusal import Refusal
from infra.settings import (
    check_home_folder,
    prefect_api_url,
    prefect_home,
    runs_folder,
    tracking_uri,
    unless_set,
    use_private_prefect_api,
)

PREFECT_PORT, MLFLOW_PORT = 4200, 5000
AUTH_STRING = "PREFECT_API_AUTH_STRING"
"""The variable from which Prefect's clients take their credential."""
START_S = 300.0
"""Making both databases took 25 s on two idle cores."""
ANSWER_S = 2.0
POLL_S = 0.1
GRACE_S = 5.0
SQLITE = "sqlite:///"
PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # Leases in memory would be lost, and their slots never freed, when the server ends before a run.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # By default only events are ever removed: flow runs, their logs and artifacts would stay for good.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(30 * 86_400),
    "PREFECT_SERVER_CONCURRENCY_MAXIMUM_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
}
MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}


@dataclass(frozen=True)
class Server:
    """A web server that was started here."""

    name: str
    address: str
    process: Process
    health: str

    def trouble(self) -> str | None:
        """Why it does not answer; None where it does."""
        return trouble(self.health, ANSWER_S, direct=True)


def new_credential() -> str:
    """A user and password for a Prefect server's API, as `PREFECT_API_AUTH_STRING` holds them."""
    return f"draftsmith:{secrets.token_urlsafe(24)}"


def start_prefect(owner: Owner, port: int, credential: str, settings: Mapping[str, str] | None = None) -> Server:
    """Prefect's server; without `settings` over its home database, in which runs made without a server are, too.

    Raises Refusal where that database cannot be made or written.

    Its API can start commands through the deployments' work pools, so it answers only requests with
    `credential`, and no page of another origin may ask it (other users of the machine, a web page in a browser here).
    """
    if settings is None:
        _check_prefect_home()
    address = f"http://{HOST}:{port}"
    guarded = {
        AUTH_STRING: credential,
        "PREFECT_SERVER_API_AUTH_STRING": credential,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"{address},http://localhost:{port}",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    }
    # The page asks the API at this address: one left over from elsewhere would show nothing.
    environment = unless_set(PREFECT) | {"PREFECT_API_URL": f"{address}/api", **guarded, **(settings or {})}
    command = module("prefect", "server", "start", "--host", HOST, "--port", str(port))
    process = start("prefect-server", command, owner, environment, grace_s=GRACE_S)
    return Server("Prefect", address, process, f"{address}/api/health")


def start_mlflow(owner: Owner, port: int, settings: Mapping[str, str] | None = None) -> Server:
    """MLflow's server; without `settings` over the runs' database and files. Raises Refusal where it may not write."""
    address = f"http://{HOST}:{port}"
    guarded = {
        # Also refuses names that a foreign page has let point to this machine (DNS rebinding).
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{HOST}:{port},localhost:{port}",
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"{address},http://localhost:{port}",
    }
    environment = unless_set(MLFLOW) | guarded | dict(_runs_store() if settings is None else settings)
    command = module("mlflow", "server", "--workers", "1", "--host", HOST, "--port", str(port))
    process = start("mlflow-server", command, owner, environment, grace_s=GRACE_S)
    return Server("MLflow", address, process, f"{address}/health")


def _runs_store() -> dict[str, str]:
    """The runs' database, with new experiments' files where the runs themselves put them."""
    uri, artifacts = tracking_uri(), runs_folder() / "mlflow-artifacts"
    if uri.startswith(SQLITE):
        database = Path(uri.removeprefix(SQLITE)).absolute()
        artifacts = database.with_name(f"{database.stem}-artifacts")
        check_writable(database)
        if not database.exists():
            from infra.tracking.client import connect

            connect(uri)  # with the lock that a run starting now takes, too
    return {  # not as options: a database's address may hold a password
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": artifacts.as_uri(),
        "MLFLOW_ARTIFACTS_DESTINATION": artifacts.as_uri(),
    }


def wait_for_answer(
    process: Process,
    what: str,
    trouble: Callable[[], str | None],
    timeout_s: float,
    stop: threading.Event | None = None,
) -> bool:
    """Whether `trouble` has nothing more to say of the server; False when told to stop first.

    Raises Refusal when it does not answer in time, ProcessFailedError when it ends, with whatever status.
    """
    deadline, stop = time.monotonic() + timeout_s, stop or threading.Event()
    while not stop.is_set():
        if failure := process.failure(endless=True):
            raise failure
        why = trouble()
        if why is None:
            return True
        if time.monotonic() > deadline:
            raise Refusal(f"{what} does not answer after {timeout_s:g} s ({why}): look at its log, {process.log}")
        stop.wait(POLL_S)
    return False


def wait_until_up(servers: Sequence[Server], stop: threading.Event | None = None) -> bool:
    """Whether all answer; False when told to stop first. Raises as `wait_for_answer`."""

    def trouble_of(server: Server) -> str | None:
        for one in servers:  # one that has ended ends the wait for the others
            if failure := one.process.failure(endless=True):
                raise failure
        return server.trouble()

    return all(wait_for_answer(one.process, one.name, partial(trouble_of, one), START_S, stop) for one in servers)


def _check_prefect_home() -> None:
    """Raise Refusal where Prefect's database cannot be made or written; its server would print a hundred lines."""
    home = prefect_home()
    make_folder(home)
    if not os.access(home, os.W_OK | os.X_OK):
        raise Refusal(
            f"Prefect keeps its database in {home}, which is not writable: set $PREFECT_HOME to a folder of yours"
        )
    check_writable(home / "prefect.db")


@contextmanager
def prefect_api() -> Iterator[None]:
    """A Prefect API for this process's flows: the one that is configured, or a private server until the process ends.

    The server starts while the body runs, which may import Prefect but ask it nothing yet. Prefect's own temporary
    server outlives a process that is killed or told to stop; a supervised one does not.
    """
    check_home_folder()
    if prefect_api_url() is not None:
        yield
        return
    credential = new_credential()
    # It binds after seconds of loading, when another server could have taken the port.
    with reserved_port() as (port, _):
        server = start_prefect(Owner("prefect", runs_folder() / ".servers"), port, credential)
        # After Prefect's own exit handlers, which still send logs: those are registered later, so they run before.
        atexit.register(server.process.stop)
        use_private_prefect_api(f"{server.address}/api", credential)
        yield
        wait_until_up([server])
