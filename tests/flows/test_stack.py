"""`draftsmith up` and `down`: a whole stack that mends itself and leaves nothing."""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows import stack_command
from flows.command_line import app
from infra.files.atomic import write_atomically
from infra.files.locks import hold
from infra.network.ports import HOST, reserved_port
from infra.processes.process import start as start_process
from infra.refusal import Refusal
from infra.servers.local import Server
from infra.servers.postgres import NOBODY
from infra.servers.stack import Stack

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from flows.command_line import main; main()"]
ANSWER_S = 300.0
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
            [*COMMAND, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=700, check=False
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
    write_atomically(folder / "up.log", "an earlier start\n")
    started = draftsmith("up", "--background")
    assert started.returncode == 0, started.stderr
    assert (folder / "up.log").read_text().startswith("an earlier start\n")
    prefect, mlflow = (port_of(page, started.stdout) for page in ("Prefect", "MLflow"))
    assert_closed_to_strangers(f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}")
    settings = {PREFECT_API_URL: f"http://127.0.0.1:{prefect}/api", PREFECT_API_AUTH_STRING: credential(folder)}
    with temporary_settings(settings), get_client(sync_client=True) as client:
        assert {"retrain", "recover"} <= {deployment.name for deployment in client.read_deployments()}
        with clean_up_by_schedule(client, timedelta(seconds=20)):
            until(lambda: completed_by_schedule(client) >= 2, "for two scheduled runs")
    for kind in SERVERS:
        assert any(kind in command_line(process) for process in processes(folder)), kind
    assert {address for process in processes(folder) for address in listens_at(process)} == {"127.0.0.1"}
    assert (folder / "environment").stat().st_mode & 0o077 == 0

    assert list((folder / "prefect" / "concurrency_leases").iterdir())
    assert not (public_folder / "prefect" / "concurrency_leases").exists()  # where other servers look for theirs

    again = draftsmith("up")
    assert again.returncode == 2
    assert f"it is up already: Prefect  http://127.0.0.1:{prefect}" in again.stderr

    before = processes(folder)
    for victim in (p for p in before if "mlflow server" in command_line(p)):
        with suppress(psutil.NoSuchProcess):  # it died with its supervisor
            victim.kill()  # its supervisor as well: a child of the server is left
    until(lambda: new_mlflow(folder, before), "for MLflow to be started again")
    until(lambda: answers(f"http://127.0.0.1:{mlflow}/health"), "for MLflow to come back")

    assert draftsmith("down").stdout == "everything is down\n"
    until(lambda: not processes(folder), "for the last process")  # that had held the lock
    assert draftsmith("down").stdout == "nothing is up\n"


def test_a_living_stack_keeps_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own output goes there: a second start is refused, without a process."""
    folder = tmp_path / ".stack"
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path))
    monkeypatch.setattr(stack_command, "GONE_S", 0.0)
    monkeypatch.chdir(ROOT)
    write_atomically(folder / "up.log", "everything is up\n")
    write_atomically(folder / "addresses", "Prefect  http://127.0.0.1:1\n")
    with hold(folder / "lock"), pytest.raises(Refusal, match=r"it is up already: Prefect  http://127\.0\.0\.1:1;"):
        CliRunner().invoke(app, ["up", "--background"], catch_exceptions=False)
    assert (folder / "up.log").read_text() == "everything is up\n"


def test_a_stack_on_another_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Login nodes share the folder of runs, and each has a loopback of its own."""
    folder = tmp_path / ".stack"
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path))
    monkeypatch.setattr(stack_command, "GONE_S", 0.0)
    monkeypatch.chdir(ROOT)
    write_atomically(folder / "host", "login1")
    write_atomically(folder / "addresses", "Prefect  http://127.0.0.1:1\n")
    with hold(folder / "lock"), pytest.raises(Refusal, match=r"it is up already on login1: Prefect .* end it there"):
        CliRunner().invoke(app, ["up"], catch_exceptions=False)


def test_a_stack_that_may_live_on_another_machine_is_not_started_twice(tmp_path: Path) -> None:
    """Lustre's locks may hold on one machine alone (localflock), and PostgreSQL's are no better there."""
    folder, mounts = tmp_path / ".stack", tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/home {tmp_path} lustre rw,localflock 0 0\n")
    stack_command.check_host(folder, mounts)
    write_atomically(folder / "host", platform.node())
    stack_command.check_host(folder, mounts)
    write_atomically(folder / "host", "login1")
    with pytest.raises(Refusal, match=rf"was started on login1, .* `draftsmith down` there.* delete {folder / 'host'}"):
        stack_command.check_host(folder, mounts)
    with hold(folder / "lock"):  # up, and locks do hold
        stack_command.check_host(folder, mounts)
    mounts.write_text("disk / ext4 rw 0 0\n")  # a container's name changes with each start
    stack_command.check_host(folder, mounts)


def test_a_stack_of_another_user_is_refused_with_its_owner(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = public_folder / ".stack"
    write_atomically(folder / "prefect-credential", "secret", mode=0o600)
    folder.chmod(0o777)
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(public_folder))
    monkeypatch.chdir(ROOT)
    if os.getuid() != 0:  # no user may become another one
        (folder / "prefect-credential").chmod(0)
    with as_nobody(), pytest.raises(Refusal, match=rf"{folder} belongs to {folder.owner()}.*\$DRAFTSMITH_RUNS"):
        CliRunner().invoke(app, ["up"], catch_exceptions=False)
    assert [path.name for path in folder.iterdir()] == ["prefect-credential"]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Where this user is root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_stack_keeps_its_ports(tmp_path: Path) -> None:
    """Shells, schedules and servers have them; another user's stack may hold them after a restart of the machine."""
    with reserved_port() as (prefect, _), reserved_port() as (mlflow, _), reserved_port() as (other, _):
        assert stack_command.kept_ports(tmp_path, prefect, mlflow) == (prefect, mlflow)
        assert stack_command.kept_ports(tmp_path, None, None) == (prefect, mlflow)
        with socket.create_server((HOST, mlflow)):
            with pytest.raises(Refusal, match=rf"MLflow's port {mlflow} .*--mlflow-port"):
                stack_command.kept_ports(tmp_path, None, None)
            assert stack_command.kept_ports(tmp_path, None, other) == (prefect, other)
        assert stack_command.kept_ports(tmp_path, None, None) == (prefect, other)
        with pytest.raises(Refusal, match=f"cannot both have port {other}"):
            stack_command.kept_ports(tmp_path, other, None)


def test_down_stops_a_stack_that_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path))
    monkeypatch.setattr("infra.servers.local.START_S", 30.0)
    stopping: list[Future[None]] = []
    with ThreadPoolExecutor(1) as threads:

        def start(stack: Stack) -> tuple[str, Mapping[str, str]]:
            assert (stack.folder / "host").read_text() == platform.node()
            silent = start_process("silent", ["sleep", "600"], stack.owner)
            stack.serve(lambda: Server("silent", "", silent, f"http://{HOST}:9/"))
            stopping.append(threads.submit(stack_command.down))
            assert not stack.wait_until_up()
            return "addresses", {}

        stack_command.serve("stack", start, 0)
        stopping[0].result()
    assert capsys.readouterr().out.split("\n")[1:] == ["stopping", "everything is down", ""]
    assert not (tmp_path / ".stack" / "addresses").exists()
    assert not (tmp_path / ".stack" / "stop").exists()
    assert not (tmp_path / ".stack" / "host").exists()


def credential(folder: Path) -> str:
    for file in ("prefect-credential", "environment"):
        assert (folder / file).stat().st_mode & 0o077 == 0
    secret = (folder / "prefect-credential").read_text()
    assert f"PREFECT_API_AUTH_STRING={secret}" in (folder / "environment").read_text()
    for process in processes(folder):
        assert secret not in command_line(process)
    for log in (folder / "logs").glob("*.log"):
        assert secret not in log.read_text(errors="replace"), log
    return secret


def assert_closed_to_strangers(prefect: str, mlflow: str) -> None:
    """A request without the credential, and a page of another origin in the operator's browser."""
    body = {"name": "foreign", "flow_id": str(uuid4())}
    for headers in ({}, {"Origin": "http://evil.example", "Content-Type": "text/plain"}):
        answer = httpx.post(f"{prefect}/api/flow_runs/", content=json.dumps(body), headers=headers, timeout=ANSWER_S)
        assert answer.status_code in (401, 403)
        assert "access-control-allow-origin" not in answer.headers
    assert httpx.get(f"{prefect}/api/deployments/name/retrain/retrain", timeout=ANSWER_S).status_code == 401
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{prefect}/api/flow_runs/", headers=asked, timeout=ANSWER_S)
    assert "access-control-allow-origin" not in answer.headers
    experiment = {"json": {"name": "foreign"}, "timeout": ANSWER_S}
    create = f"{mlflow}/api/2.0/mlflow/experiments/create"
    assert httpx.post(create, headers={"Origin": "http://evil.example"}, **experiment).status_code == 403
    assert httpx.post(create, headers={"Host": "evil.example"}, **experiment).status_code == 403


@contextmanager
def clean_up_by_schedule(client: SyncPrefectClient, interval: timedelta) -> Iterator[None]:
    """A schedule as an operator would make it: short, on a flow that needs no GPU."""
    deployment = client.read_deployment_by_name("clean-up/clean-up")
    (schedule,) = client.create_deployment_schedules(deployment.id, [(IntervalSchedule(interval=interval), True)])
    yield
    client.delete_deployment_schedule(deployment.id, schedule.id)  # each run takes the rest of the test its processor


def completed_by_schedule(client: SyncPrefectClient) -> int:
    runs = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["clean-up"])))
    failed = [run for run in runs if run.state_type in (StateType.FAILED, StateType.CRASHED)]
    assert not failed, failed[0].state
    return sum(run.auto_scheduled and run.state_type == StateType.COMPLETED for run in runs)


def new_mlflow(folder: Path, before: list[psutil.Process]) -> bool:
    return any("mlflow server" in command_line(process) for process in set(processes(folder)) - set(before))


def command_line(process: psutil.Process) -> str:
    """Empty once the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def listens_at(process: psutil.Process) -> set[str]:
    """Empty once the process has ended, as those of PostgreSQL's clients do at any time."""
    try:
        return {one.laddr.ip for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
    except psutil.NoSuchProcess:
        return set()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False
