"""The deployment of prefect.yaml, run once by a real Prefect server and a real worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.records import TargetRecord
from models.config import RunConfig, load_recipe

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]
START_S = 120.0
RUN_S = 480.0
SMALL = [
    "training.max_steps=20",
    "benchmark.prompts=8",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=64",
    "benchmark.timed_tokens=16",
]


@pytest.fixture
def deployment() -> dict[str, Any]:
    (found,) = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    return found


def test_the_deployment_carries_the_quickstart_recipe(deployment: dict[str, Any]) -> None:
    assert RunConfig.model_validate(deployment["parameters"]["config"]) == load_recipe(ROOT / "recipes/quickstart.yaml")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A command in a process group of its own, stopped at the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | {
        "PWD": str(ROOT),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DRAFTSMITH_RUNS": str(tmp_path / "runs"),
    }


def prefect(environment: dict[str, str], *arguments: str) -> str:
    ended = subprocess.run(
        [*PREFECT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def wait_for_server(api: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{api}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)


def wait_for_run(api: str, run: str) -> dict[str, Any]:
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        found = httpx.get(f"{api}/flow_runs/{run}", timeout=30).raise_for_status().json()
        if found["state"]["type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}:
            return found
        time.sleep(1)
    raise AssertionError("the flow run did not end")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_runs_the_deployment(tmp_path: Path, environment: dict[str, str], tiny_target: TargetRecord) -> None:
    api = environment["PREFECT_API_URL"]
    config = load_recipe(ROOT / "recipes" / "tiny.yaml", SMALL)
    port = api.removesuffix("/api").rpartition(":")[2]
    with ExitStack() as stack:
        server = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", port]
        stack.enter_context(running(server, environment, tmp_path / "server.log"))
        wait_for_server(api)
        prefect(environment, "work-pool", "create", "draftsmith", "--type", "process")
        prefect(environment, "--no-prompt", "deploy", "--all")
        deployed = httpx.get(f"{api}/deployments/name/retrain/retrain", timeout=30).raise_for_status().json()
        assert [schedule["active"] for schedule in deployed["schedules"]] == [False]
        assert "RunConfig" in deployed["parameter_openapi_schema"]["definitions"]
        refused = httpx.post(
            f"{api}/deployments/{deployed['id']}/create_flow_run", json={"parameters": {"config": {}}}, timeout=30
        )
        assert refused.status_code == 409, refused.text

        stack.enter_context(
            running([*PREFECT, "worker", "start", "--pool", "draftsmith"], environment, tmp_path / "worker.log")
        )
        body = {"parameters": {"config": config.model_dump(mode="json"), "run": "deployed"}}
        created = httpx.post(f"{api}/deployments/{deployed['id']}/create_flow_run", json=body, timeout=30)
        found = wait_for_run(api, created.raise_for_status().json()["id"])
        assert found["state"]["type"] == "COMPLETED", found["state"]["message"] + (tmp_path / "worker.log").read_text()

        report = json.loads((tmp_path / "runs" / "deployed" / "report.json").read_text())
        assert report["samples"]["consumed"] == 20 * config.training.samples_per_step
        artifacts = httpx.post(f"{api}/artifacts/filter", json={}, timeout=30).raise_for_status().json()
        assert {artifact["key"] for artifact in artifacts} == {"acceptance-length", "report"}
