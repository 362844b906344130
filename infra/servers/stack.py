"""The servers of a whole stack on one machine, kept running: PostgreSQL, S3, Prefect, MLflow, workers.

Run by `draftsmith up`. Every server listens on loopback alone; databases, objects and secrets stay in the folder.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec

from infra.files.atomic import write_atomically
from infra.network.ports import HOST
from infra.processes.keep_running import KeptProcess
from infra.processes.process import Owner, Process, module, start
from infra.servers.local import AUTH_STRING, Server, new_credential, start_mlflow, start_prefect, wait_until_up
from infra.servers.postgres import PostgresServer
from infra.servers.s3 import S3Server

BUCKET = "draftsmith"
DEPLOY_S = 180.0
GRACE_S = 10.0
CLEAN_UP_POOL = "draftsmith-recovery"
WORK_POOLS = ("draftsmith", CLEAN_UP_POOL)
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
WORKER = {
    "PREFECT_WORKER_QUERY_SECONDS": "2",  # seconds between two looks for work; 10 by default
}


@dataclass(frozen=True)
class StackPorts:
    """Ports of the web pages."""

    prefect: int
    mlflow: int


@dataclass(frozen=True)
class Stack:
    """What runs, and how to reach it."""

    kept: Mapping[str, KeptProcess]
    environment: Mapping[str, str]
    """Addresses and credentials, as environment variables."""

    def tend(self, say: Callable[[str], None]) -> None:
        """Start again what has died. Raises ProcessFailedError for a server that cannot be started any more."""
        for kept in self.kept.values():
            kept.tend(lambda _line: None, say)
            if kept.failure is not None:
                raise kept.failure


@contextmanager
def stack(folder: Path, owner: Owner, ports: StackPorts, say: Callable[[str], None]) -> Iterator[Stack]:
    """Start everything, deploy prefect.yaml of the current folder, and stop everything at the end.

    Raises Refusal for a missing package; Refusal, TimeoutError or ProcessFailedError for a server that does not
    come up.
    """
    kept: dict[str, KeptProcess] = {}
    with ExitStack() as stopping:

        def keep(name: str, launch: Callable[[], Process], running: Process | None = None) -> None:
            kept[name] = KeptProcess(launch, running=running)
            stopping.callback(kept[name].close)

        def serve(launch: Callable[[], Server]) -> Server:
            server = launch()
            keep(server.name, lambda: launch().started, server.started)
            return server

        postgres = PostgresServer(folder / "postgres", owner)
        keep("PostgreSQL", postgres.start, postgres.process)
        s3 = S3Server(folder / "s3", owner)
        keep("S3", s3.start, s3.process)
        _make_bucket(s3)
        prefect, mlflow = f"http://{HOST}:{ports.prefect}", f"http://{HOST}:{ports.mlflow}"
        credential = _credential(folder / "prefect-credential")
        environment = {
            "PREFECT_API_URL": f"{prefect}/api",
            AUTH_STRING: credential,
            "MLFLOW_TRACKING_URI": mlflow,
            **s3.access.environment,
        }
        flows, drafts = environment | _prefect_store(postgres), environment | _mlflow_store(postgres)
        servers = [
            serve(lambda: start_prefect(owner, ports.prefect, credential, settings=flows)),
            serve(lambda: start_mlflow(owner, ports.mlflow, settings=drafts)),
        ]
        wait_until_up(servers[:1])
        _deploy(owner, folder, environment)
        wait_until_up(servers[1:])
        # Clean-up runs there, and only with MLflow's own database can it remove deleted rows.
        clean_up = environment | {MLFLOW_DATABASE: drafts[MLFLOW_DATABASE]}
        for pool in WORK_POOLS:
            settings = clean_up if pool == CLEAN_UP_POOL else environment
            keep(f"worker of {pool}", lambda pool=pool, settings=settings: _start_worker(owner, pool, settings))
        say("everything is up")
        yield Stack(kept, environment)


def _credential(file: Path) -> str:
    """Prefect's, the same after a restart, so that shells and browsers that have it stay logged in."""
    if not file.exists():
        write_atomically(file, new_credential(), mode=0o600)
    return file.read_text()


def _make_bucket(s3: S3Server) -> None:
    access = s3.access
    files = fsspec.filesystem(
        "s3", endpoint_url=access.address, key=access.access_key, secret=access.secret_key, skip_instance_cache=True
    )
    if not files.exists(BUCKET):
        files.mkdir(BUCKET)


def _prefect_store(postgres: PostgresServer) -> dict[str, str]:
    database = postgres.make_database("prefect").replace("postgresql+psycopg:", "postgresql+asyncpg:")
    return {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database}


def _mlflow_store(postgres: PostgresServer) -> dict[str, str]:
    return {
        MLFLOW_DATABASE: postgres.make_database("mlflow"),
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": f"s3://{BUCKET}/mlflow",
        "MLFLOW_SERVE_ARTIFACTS": "false",
    }


def _start_worker(owner: Owner, pool: str, environment: Mapping[str, str]) -> Process:
    command = module("prefect", "worker", "start", "--pool", pool, "--name", pool)
    return start(f"worker-{pool}", command, owner, {**environment, **WORKER}, grace_s=GRACE_S)


def _deploy(owner: Owner, folder: Path, environment: Mapping[str, str]) -> None:
    """Work pools and deployments of prefect.yaml; what the operator changed of them stays."""
    process = start("prefect-deploy", module("tasks.deployments", folder), owner, environment)
    try:
        process.wait(DEPLOY_S)
    finally:
        process.stop()


def write_environment(file: Path, environment: Mapping[str, str]) -> None:
    """A file for `source`, readable by its owner alone: it holds a secret."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    write_atomically(file, "\n".join([*lines, ""]), mode=0o600)
