"""`draftsmith ui` with real servers: what they show, and that nothing outlives the command."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.files.locks import hold
from infra.network.ports import reserved_port
from infra.tracking import runs

ROOT = Path(__file__).parents[2]
STARTED_S = 400.0
ENDED_S = 240.0
UI = f".ui-{os.getuid()}"
FLOW = """
from prefect import flow

@flow
def earlier():
    return 1

earlier()
"""


DEAD_PROXIES = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
"""Who uses them for servers on loopback hangs."""


def environment(home: Path) -> dict[str, str]:
    """No servers of whoever runs the tests, and folders of these tests' own."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    own = {"PREFECT_HOME": str(home / "prefect"), "DRAFTSMITH_RUNS": str(home / "runs"), **DEAD_PROXIES}
    quiet = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300"}
    return {**bare, **own, **quiet}


class Ui:
    """A running `draftsmith ui`."""

    def __init__(self, home: Path, ports: tuple[int, int]) -> None:
        self.home = home
        self.ports = ports
        self.output = home / f"ui-{self.ports[0]}.txt"
        options = [f"--prefect-port={self.ports[0]}", f"--mlflow-port={self.ports[1]}"]
        self.process = command(home, self.output, *options)

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def wait_until_up(self) -> list[psutil.Process]:
        """Everything it started, once it says that it is ready."""
        until(lambda: "Ctrl-C" in self.printed or self.process.poll() is not None, STARTED_S)
        assert self.process.poll() is None, self.printed
        family = psutil.Process(self.process.pid).children(recursive=True)
        assert len(family) >= 4, family  # two supervisors, two servers
        return family

    def get(
        self,
        port: int,
        path: str,
        body: dict[str, Any] | None = None,
        credential: str = "",
        guards: dict[str, str] | None = None,
    ) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(guards or {})}
        if credential:
            headers["Authorization"] = f"Basic {base64.b64encode(credential.encode()).decode()}"
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
            return answer.read().decode()


def command(home: Path, output: Path, *options: str) -> "subprocess.Popen[bytes]":
    script = [sys.executable, "-c", "from flows.command_line import main; main()", "ui", *options]
    with output.open("wb") as file:
        return subprocess.Popen(script, cwd=ROOT, env=environment(home), stdout=file, stderr=subprocess.STDOUT)


def until(condition: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def running(family: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in family if alive(one)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the database of a run made without a server."""
    folder = tmp_path_factory.mktemp("home")
    made_so = environment(folder) | {"NO_PROXY": "127.0.0.1"}  # Prefect by itself asks the proxy for its own server
    subprocess.run([sys.executable, "-c", FLOW], env=made_so, cwd=folder, timeout=400, check=True)
    return folder


@pytest.fixture
def start_ui() -> Iterator[Callable[[Path], Ui]]:
    """Starts `draftsmith ui` on free ports; none outlives the test."""
    started: list[Ui] = []
    with ExitStack() as stack:  # nobody takes a port before its server, whose start may take a minute, has bound it

        def start(home: Path) -> Ui:
            (prefect, _), (mlflow, _) = (stack.enter_context(reserved_port()) for _ in range(2))
            started.append(Ui(home, (prefect, mlflow)))
            return started[-1]

        yield start
        for ui in started:
            if ui.process.poll() is None:
                ui.process.kill()
                ui.process.wait(ENDED_S)


@pytest.mark.slow
def test_both_servers_show_earlier_runs_until_sigterm_which_leaves_nothing(
    home: Path, start_ui: Callable[[Path], Ui], tmp_path: Path
) -> None:
    (home / "runs").mkdir(exist_ok=True)
    (tmp_path / "note.txt").write_text("seen")
    uri = f"sqlite:///{home / 'runs' / 'mlflow.db'}"
    run = runs.start_run(tmp_path / "tracking.json", uri, "draftsmith", "earlier", {}, {})
    runs.connect(uri).log_artifact(run.run_id, str(tmp_path / "note.txt"))
    ui = start_ui(home)
    family = ui.wait_until_up()
    prefect, mlflow = ui.ports
    assert f"http://127.0.0.1:{prefect}" in ui.printed
    assert f"http://127.0.0.1:{mlflow}" in ui.printed
    variables = (home / "runs" / UI / "environment").read_text()
    assert f"export PREFECT_API_URL=http://127.0.0.1:{prefect}/api" in variables
    assert "Model training" in ui.printed
    assert json.loads(ui.get(prefect, "/ui-settings"))["api_url"] == f"http://127.0.0.1:{prefect}/api"
    credential = variables.partition("PREFECT_API_AUTH_STRING=")[2].split()[0]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ui.get(prefect, "/api/flow_runs/filter", {})
    token = json.loads(ui.get(prefect, "/api/csrf-token?client=test", credential=credential))["token"]
    guards = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"}
    shown = json.loads(ui.get(prefect, "/api/flow_runs/filter", {}, credential, guards))
    assert [one["state_type"] for one in shown] == ["COMPLETED"]
    assert "<html" in ui.get(mlflow, "/")
    assert "earlier" in ui.get(mlflow, f"/api/2.0/mlflow/runs/get?run_id={run.run_id}")
    assert ui.get(mlflow, f"/get-artifact?path=note.txt&run_uuid={run.run_id}") == "seen"
    second = command(home, tmp_path / "second.txt")
    assert second.wait(ENDED_S) == 2
    refusal = (tmp_path / "second.txt").read_text()
    assert f"http://127.0.0.1:{mlflow}" in refusal
    assert "Traceback" not in refusal
    ui.process.send_signal(signal.SIGTERM)
    assert ui.process.wait(ENDED_S) == 0, ui.printed
    assert not running(family)
    assert "Traceback" not in ui.printed


@pytest.mark.slow
def test_a_killed_command_leaves_nothing(tmp_path: Path, start_ui: Callable[[Path], Ui]) -> None:
    ui = start_ui(tmp_path)  # nothing is there yet: both databases are made
    family = ui.wait_until_up()
    ui.process.kill()
    ui.process.wait(ENDED_S)
    with hold(tmp_path / "runs" / UI / "lock", wait_s=ENDED_S):
        until(lambda: not running(family), ENDED_S)  # the supervisors themselves are the last to go


@pytest.mark.long
def test_a_server_that_dies_ends_the_command_with_the_end_of_its_log(
    home: Path, start_ui: Callable[[Path], Ui]
) -> None:
    ui = start_ui(home)
    family = ui.wait_until_up()
    server = next(one for one in family if "mlflow" in one.cmdline() and "--grace" not in one.cmdline())
    server.kill()
    assert ui.process.wait(ENDED_S) == 1
    assert "mlflow-server was killed by signal 9" in ui.printed
    assert str(home / "runs" / UI / "logs" / "mlflow-server.log") in ui.printed
    assert "Uvicorn running" in ui.printed  # the end of the log
    assert not running(family)


@pytest.mark.long
def test_told_to_stop_while_it_starts_it_stops(tmp_path: Path, start_ui: Callable[[Path], Ui]) -> None:
    ui = start_ui(tmp_path)
    until((tmp_path / "runs" / UI / "logs" / "prefect-server.log").exists, ENDED_S)
    family = psutil.Process(ui.process.pid).children(recursive=True)
    ui.process.send_signal(signal.SIGINT)
    assert ui.process.wait(ENDED_S) == 0, ui.printed
    assert not running(family)


@pytest.mark.parametrize("option", ["--prefect-port", "--mlflow-port"])
def test_a_port_that_is_taken_is_refused(tmp_path: Path, option: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ended = command(tmp_path, tmp_path / "ui.txt", f"{option}={port}")
        assert ended.wait(ENDED_S) == 2
    printed = (tmp_path / "ui.txt").read_text()
    assert f"{option} {port} is taken" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "variable", [{"PREFECT_API_URL": "http://name.invalid/api"}, {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}]
)
def test_a_server_elsewhere_that_is_silent_is_refused(tmp_path: Path, variable: dict[str, str]) -> None:
    script = [sys.executable, "-c", "from flows.command_line import main; main()", "ui"]
    where = {**environment(tmp_path), **variable}
    ended = subprocess.run(script, cwd=ROOT, env=where, capture_output=True, text=True, timeout=ENDED_S, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"{next(iter(variable))} names {next(iter(variable.values()))}" in ended.stderr
    assert not (tmp_path / "runs").exists()
