"""A real Prefect server with the project's deployments, and workers that tests start and kill."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.workers.process import ProcessWorker

from infra.network.ports import reserved_port
from infra.servers.postgres import PostgresServer

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]
WAIT_S = 480.0
BUSY_S = 300.0
LOOK_S = 1.0
"""Looking costs the server, and all processes are on the same few cores."""
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


MORTAL = """
import os, sys
from infra.processes.exit import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A command in a process group of its own, stopped at the end, and killed where pytest itself is killed."""
    command = [sys.executable, "-c", MORTAL, str(os.getpid()), *command]
    with log.open("a") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)


@dataclass
class Stack:
    """The server and what is asked of it."""

    home: Path
    environment: dict[str, str]

    @property
    def api(self) -> str:
        return self.environment["PREFECT_API_URL"]

    @property
    def runs(self) -> Path:
        return self.home / "runs"

    @property
    def memory(self) -> Path:
        return Path(self.environment["DRAFTSMITH_SHM"])

    def prefect(self, *arguments: str) -> None:
        ended = subprocess.run(
            [*PREFECT, *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=WAIT_S,
            check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def worker(self, pool: str = "draftsmith", **environment: str) -> Any:
        """A worker of one of the deployments' work pools, as a context manager."""
        log = self.home / "worker.log"
        return running([*PREFECT, "worker", "start", "--pool", pool], self.environment | environment, log)

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("PATCH", path, body)

    def delete(self, path: str) -> None:
        self._ask("DELETE", path, None)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """Asks again, as Prefect's own client does, while the server's SQLite is busy."""
        deadline = time.monotonic() + BUSY_S
        while True:
            answer = httpx.request(method, f"{self.api}/{path}", json=body, timeout=WAIT_S)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                return answer.raise_for_status().json() if answer.content else None
            time.sleep(1)

    def flow_runs(self, flow: str) -> list[str]:
        """Ids of a flow's runs, oldest first."""
        wanted = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return [found["id"] for found in self.post("flow_runs/filter", wanted)]

    def wait_for(self, flow_run: str, *states: str) -> dict[str, Any]:
        """The flow run once it is in one of the states."""
        until(lambda: self.get(f"flow_runs/{flow_run}")["state"]["type"] in (states or ENDED))
        return self.get(f"flow_runs/{flow_run}")

    def log(self) -> str:
        return (self.home / "worker.log").read_text()[-6000:]


def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain {what}"
        time.sleep(LOOK_S)


@pytest.fixture
def tmp_path(path_in_memory: Path) -> Path:
    """Nothing here is about a disk."""
    return path_in_memory


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    """Waits, with an end: `until(condition, "for what")`."""
    return until


@pytest.fixture(scope="session")
def server_port() -> Iterator[int]:
    """Nobody takes it before the server, whose start may take a minute, has bound it."""
    with reserved_port() as (port, _):
        yield port


@pytest.fixture(scope="session")
def stack(session_in_memory: Path, server_port: int, postgres: PostgresServer) -> Iterator[Stack]:
    """A server over PostgreSQL, as `draftsmith up` starts it, with prefect.yaml deployed; no worker.

    Over SQLite its services lock each other out, for a minute at a time on two cores.
    """
    home = session_in_memory / "prefect"
    home.mkdir()
    database = postgres.make_database("prefect").replace("postgresql+psycopg:", "postgresql+asyncpg:")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    found = Stack(
        home,
        inherited
        | {
            "PWD": str(ROOT),
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{server_port}/api",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DRAFTSMITH_RUNS": str(home / "runs"),
            "DRAFTSMITH_SHM": str(home / "shm"),
        },
    )
    found.memory.mkdir()
    server = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(server_port)]
    with running(server, found.environment, home / "server.log"):
        until(lambda: _healthy(found.api), "for the server")
        template = ProcessWorker.get_default_base_job_template()
        for pool in ("draftsmith", "draftsmith-recovery"):  # as `prefect work-pool create` does
            found.post("work_pools/", {"name": pool, "type": ProcessWorker.type, "base_job_template": template})
        found.prefect("--no-prompt", "deploy", "--all")
        yield found


def _healthy(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=5).is_success
    except httpx.TransportError:
        return False
