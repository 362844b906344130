"""Servers of one machine, kept running together: the two with web pages, or a whole stack with databases and workers.

Run by `draftsmith ui` and `draftsmith up`. Every server listens on loopback alone; databases, objects and secrets stay
in the stack's folder.
"""

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import fsspec

from infra.files.atomic import write_atomically
from infra.network.ports import HOST
from infra.processes.keep_running import RESTARTS, KeptProcess
from infra.processes.process import Owner, Process, module, start
from infra.servers.local import AUTH_STRING, Server, new_credential, start_mlflow, start_prefect, wait_until_up
from infra.servers.postgres import PostgresServer
from infra.servers.s3 import S3Server
from infra.settings import prefect_home, unless_set

BUCKET = "draftsmith"
DEPLOY_S = 180.0
SCHEMA_S = 3600.0
"""MLflow's migrations may rewrite large tables."""
POLL_S = 0.1
GRACE_S = 10.0
CLEAN_UP_POOL = "draftsmith-recovery"
WORK_POOLS = ("draftsmith", CLEAN_UP_POOL)
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
WORKER = {
    "PREFECT_WORKER_QUERY_SECONDS": "2",  # seconds between two looks for work; 10 by default
}


class Stack:
    """What runs together. Whoever made it closes it."""

    def __init__(self, folder: Path, owner: Owner, stop: threading.Event, restarts: int = RESTARTS):
        """`restarts`: how often a crashed process is started again; 0: what ends, ends the stack."""
        self.folder, self.owner, self._stop, self._restarts = folder, owner, stop, restarts
        self._kept: list[KeptProcess] = []
        self._closing = ExitStack()
        self._servers: list[Server] = []

    def keep(self, launch: Callable[[], Process], running: Process | None = None) -> None:
        """Keep a process running; `running`: what was launched already."""
        kept = KeptProcess(launch, self._restarts, running=running, endless=True)
        self._kept.append(kept)
        self._closing.callback(kept.close)

    def keep_store(self, server: PostgresServer | S3Server) -> None:
        """Keep a server of data, which has started, running."""
        # Its restart is not awaited: that would hold up all others, and its failure would be no crash to recover from.
        self.keep(server.launch, server.process)
        self._closing.callback(server.stop)

    def serve(self, launch: Callable[[], Server]) -> None:
        """Start a server and keep it running."""
        server = launch()
        self._servers.append(server)
        self.keep(lambda: launch().process, server.process)

    def wait_until_up(self) -> bool:
        """Whether all servers answer; False when told to stop first. Raises Refusal when one does not in time."""
        return wait_until_up(self._servers, self._stop)

    def run(self, role: str, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> bool:
        """Whether a command has ended well; False when told to stop first, which ends it.

        Raises ProcessFailedError, and TimeoutError when it does not end within `timeout_s` seconds.
        """
        process, deadline = start(role, command, self.owner, environment), time.monotonic() + timeout_s
        try:
            while not process.check():
                if self._stop.wait(POLL_S):
                    return False
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{role} did not end within {timeout_s:g} s: look at its log, {process.log}")
            return True
        finally:
            process.stop()

    def tend(self, say: Callable[[str], None]) -> None:
        """Start again what has died. Raises ProcessFailedError for what is not, or no longer, started again."""
        for kept in self._kept:
            kept.tend(lambda _line: None, say)
            if kept.failure is not None:
                raise kept.failure

    def close(self) -> None:
        """Stop everything, the last started first."""
        self._closing.close()

    def credential(self) -> str:
        """Prefect's, the same after a restart, so that shells and browsers that have it stay logged in."""
        file = self.folder / "prefect-credential"
        if not file.exists():
            write_atomically(file, new_credential(), mode=0o600)
        return file.read_text()


def start_pages(stack: Stack, prefect_port: int | None, mlflow_port: int | None) -> dict[str, str]:
    """Start Prefect's and MLflow's servers over the runs of this machine (None: not that one).

    Returns address and credential of Prefect as environment variables.
    """
    environment: dict[str, str] = {}
    if prefect_port is not None:
        credential = stack.credential()
        environment = {"PREFECT_API_URL": f"http://{HOST}:{prefect_port}/api", AUTH_STRING: credential}
        stack.serve(lambda: start_prefect(stack.owner, prefect_port, credential))
    if mlflow_port is not None:
        stack.serve(lambda: start_mlflow(stack.owner, mlflow_port))
    stack.wait_until_up()
    return environment


def start_everything(stack: Stack, prefect_port: int, mlflow_port: int, take_over: bool = False) -> dict[str, str]:
    """Start all servers and workers, and deploy prefect.yaml of the current folder; with `take_over` also in place of
    another folder's.

    Returns addresses and credentials as environment variables. Raises Refusal for a missing package; Refusal,
    or ProcessFailedError for a server that does not come up.
    """
    owner, credential = stack.owner, stack.credential()
    postgres = PostgresServer(stack.folder / "postgres", owner)
    stack.keep_store(postgres)
    s3 = S3Server(stack.folder / "s3", owner)
    stack.keep_store(s3)
    _make_bucket(s3)
    environment = {
        "PREFECT_API_URL": f"http://{HOST}:{prefect_port}/api",
        AUTH_STRING: credential,
        "MLFLOW_TRACKING_URI": f"http://{HOST}:{mlflow_port}",
        **s3.access.environment,
    }
    flows = environment | _prefect_store(postgres, stack.folder / "prefect")
    drafts = environment | _mlflow_store(postgres)
    stack.serve(lambda: start_prefect(owner, prefect_port, credential, flows))
    stack.run("mlflow-schema", module("infra.servers.mlflow_schema"), drafts, SCHEMA_S)
    stack.serve(lambda: start_mlflow(owner, mlflow_port, drafts))
    deploy = _deploy_command(stack.folder, take_over)
    # No worker lives yet: flow runs that were being submitted when the stack ended are scheduled again.
    if stack.wait_until_up() and stack.run("prefect-deploy", deploy, environment, DEPLOY_S):
        # Clean-up runs there, and only with MLflow's own database can it remove deleted rows.
        clean_up = environment | {MLFLOW_DATABASE: drafts[MLFLOW_DATABASE]}
        for pool in WORK_POOLS:
            settings = clean_up if pool == CLEAN_UP_POOL else environment
            stack.keep(lambda pool=pool, settings=settings: _start_worker(owner, pool, settings))
    return environment


def _make_bucket(s3: S3Server) -> None:
    access = s3.access
    files = fsspec.filesystem(
        "s3", endpoint_url=access.address, key=access.access_key, secret=access.secret_key, skip_instance_cache=True
    )
    if not files.exists(BUCKET):
        files.mkdir(BUCKET)


def _prefect_store(postgres: PostgresServer, home: Path) -> dict[str, str]:
    database = postgres.make_database("prefect").replace("postgresql+psycopg:", "postgresql+asyncpg:")
    # Leases are files in Prefect's home. A server with another database that finds an expired one there removes it,
    # and the slots, which it does not know, stay occupied for good. Profiles are the user's.
    profiles = unless_set({"PREFECT_PROFILES_PATH": str(prefect_home() / "profiles.toml")})
    return {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database, "PREFECT_HOME": str(home), **profiles}


def _mlflow_store(postgres: PostgresServer) -> dict[str, str]:
    return {
        MLFLOW_DATABASE: postgres.make_database("mlflow"),
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": f"s3://{BUCKET}/mlflow",
        "MLFLOW_SERVE_ARTIFACTS": "false",
    }


def _start_worker(owner: Owner, pool: str, environment: Mapping[str, str]) -> Process:
    command = module("prefect", "worker", "start", "--pool", pool, "--name", pool)
    return start(f"worker-{pool}", command, owner, {**environment, **WORKER}, grace_s=GRACE_S)


def _deploy_command(folder: Path, take_over: bool) -> list[str]:
    """Work pools and deployments of prefect.yaml; what the operator changed of them stays."""
    return module("tasks.deployments", folder, "--no-workers", *(["--take-over"] if take_over else []))


def write_environment(file: Path, environment: Mapping[str, str]) -> None:
    """A file of shell commands, readable by its owner alone: it holds a secret."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    write_atomically(file, "\n".join([*lines, ""]), mode=0o600)
