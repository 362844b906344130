"""The whole loop through the command line, killed in the middle and resumed; and no secret is left anywhere."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import fsspec
import psutil
import pytest
import sqlalchemy as sa
from mlflow import MlflowClient

from infra.files.lines import last_object
from infra.processes.process import Owner
from infra.records.data_path import TargetRecord
from infra.servers.postgres import PostgresServer
from infra.servers.s3 import S3Server
from infra.tracking.client import connect
from infra.tracking.registry import list_drafts
from infra.tracking.runs import TrackedRun
from infra.transport.mooncake.environment import check_mooncake

ROOT = Path(__file__).parents[2]
STEPS = 36
SAMPLES_PER_STEP = 8
SMALL = [
    f"training.max_steps={STEPS}",
    f"training.samples_per_step={SAMPLES_PER_STEP}",
    "training.checkpoint_steps=6",
    "training.log_steps=2",
    "benchmark.prompts=8",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=64",
    "benchmark.timed_tokens=16",
    "promotion.smoke_prompts=2",
]
COMMAND = [sys.executable, "-c", "from flows.command_line import main; main()", "retrain"]
WAIT_S = 600.0
ENDED_S = 300.0


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, "ended early"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def trains(process: subprocess.Popen[str]) -> bool:
    children = psutil.Process(process.pid).children(recursive=True)
    return any("models.training.trainer" in command_line(child) for child in children)


def command_line(process: psutil.Process) -> str:
    """Empty once the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@dataclass(frozen=True)
class Servers:
    """A ledger's database, and a bucket for what MLflow is given; both let in only who knows a secret."""

    ledger: str
    """URL of an empty database, without its password."""
    password: str
    s3: S3Server

    @property
    def environment(self) -> dict[str, str]:
        return self.s3.access.environment | {"PGPASSWORD": self.password}

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.password, self.s3.access.secret_key


@pytest.fixture
def servers(postgres: PostgresServer, public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    address = sa.make_url(postgres.make_database(public_folder.name))
    ledger = sa.URL.create(address.drivername, address.username, None, address.host, address.port, address.database)
    s3 = S3Server(public_folder / "s3", Owner("tests", public_folder / "logs"))
    made = Servers(ledger.render_as_string(), str(address.password), s3)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    files(s3).mkdir("drafts")
    yield made
    s3.stop()


@pytest.fixture
def environment(tmp_path: Path, servers: Servers) -> dict[str, str]:
    (tmp_path / "shm").mkdir()
    (tmp_path / "runs").mkdir()
    connect(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}").create_experiment("draftsmith", "s3://drafts/mlflow")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | {
        "DRAFTSMITH_RUNS": str(tmp_path / "runs"),
        "DRAFTSMITH_SHM": str(tmp_path / "shm"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
    }


@pytest.fixture
def strike(tmp_path: Path, environment: dict[str, str], servers: Servers) -> Callable[..., int]:
    """Runs the command until the run has trained `step` steps, sends it a signal, and returns its exit status.

    Everything that it had started, Prefect's server included, must be gone soon afterwards.
    """

    def run(step: int, number: int, *arguments: str) -> int:
        with (tmp_path / f"{number}.txt").open("w") as output:
            process = subprocess.Popen(
                [*COMMAND, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
            )
        # An earlier command may have come as far before it was struck.
        until(lambda: trained(tmp_path / "runs") >= step and trains(process), process)
        children = psutil.Process(process.pid).children(recursive=True)
        named = [command_line(child) for child in children]
        assert any("prefect" in command for command in named)
        assert not any(secret in command for secret in servers.secrets for command in named)  # all users see them
        process.send_signal(number)
        status = process.wait(ENDED_S)
        deadline = time.monotonic() + ENDED_S
        while any(alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [command_line(child) for child in children if alive(child)]
        assert list((tmp_path / "shm").iterdir()) == []
        return status

    return run


def files(s3: S3Server) -> fsspec.AbstractFileSystem:
    return fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=s3.access.address)


def left_behind(tmp_path: Path, servers: Servers) -> Iterator[tuple[str, bytes]]:
    """Name and content of all that the run has written: files, objects, rows."""
    for path in tmp_path.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(tmp_path)), path.read_bytes()
    bucket = files(servers.s3)
    for name in bucket.find("drafts"):
        yield name, bucket.cat_file(name)
    engine = sa.create_engine(servers.ledger, poolclass=sa.NullPool)
    with engine.connect() as connection:
        for table in sa.inspect(engine).get_table_names():
            rows = connection.execute(sa.text(f'SELECT "{table}"::text FROM "{table}"')).scalars().all()
            yield f"ledger/{table}", "\n".join(rows).encode()


def spellings(text: str) -> set[bytes]:
    """As it is, inside a URL, and inside base64 at whatever place."""
    moved = (base64.b64encode(bytes(before) + text.encode()) for before in range(3))
    whole = {part[0 if not before else 4 : -4] for before, part in enumerate(moved)}
    return {text.encode(), quote(text, safe="").encode(), *whole}


def places_of(text: str, left: dict[str, bytes]) -> list[str]:
    wanted = spellings(text)
    return [name for name, content in left.items() if any(one in content for one in wanted)]


def trained(runs: Path) -> int:
    return max((line["step"] for file in runs.glob("tiny-*/metrics.jsonl") if (line := last_object(file))), default=0)


def mlflow_status(folder: Path) -> str:
    tracking = TrackedRun.read(folder / "tracking.json")
    return MlflowClient(tracking.uri).get_run(tracking.run_id).info.status


def widest_transport() -> str:
    """The one with most processes of its own, where it runs."""
    try:
        check_mooncake()
    except ValueError:
        return "auto"
    return "mooncake"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_interrupted_and_killed_run_resumes_and_loses_nothing(
    tmp_path: Path,
    environment: dict[str, str],
    servers: Servers,
    strike: Callable[..., int],
    tiny_target: TargetRecord,
) -> None:
    recipe = ["recipes/tiny.yaml", *SMALL, f"transport.kind={widest_transport()}", f"ledger.url={servers.ledger}"]
    # Early: where this process gets no core for a while, there must be steps left.
    assert strike(8, signal.SIGTERM, *recipe) == -signal.SIGTERM
    (folder,) = (tmp_path / "runs").glob("tiny-*")
    assert mlflow_status(folder) == "KILLED"
    assert strike(16, signal.SIGKILL, "--resume", folder.name) == -signal.SIGKILL

    second = subprocess.run(
        [*COMMAND, "--resume", folder.name],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert second.returncode == 0, second.stderr[-4000:]
    assert second.stdout.splitlines()[-1] == str(folder)
    assert list((tmp_path / "shm").iterdir()) == []
    assert mlflow_status(folder) == "FINISHED"

    report = json.loads((folder / "report.json").read_text())
    assert report["train"]["steps"] == STEPS
    assert report["samples"]["consumed"] == STEPS * SAMPLES_PER_STEP
    assert report["samples"]["quarantined"] == 0
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(2, STEPS + 1, 2))
    tracking = TrackedRun.read(folder / "tracking.json")
    logged = MlflowClient(tracking.uri).get_metric_history(tracking.run_id, "loss")
    assert sorted(point.step for point in logged) == steps
    (draft,) = list_drafts(tracking.uri)
    assert (draft.name, draft.version) == ("draft-tiny", report["draft"]["version"])

    for name, command in (("plan", [*COMMAND, *recipe, "--plan"]), ("status", [*COMMAND[:-1], "status", folder.name])):
        said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=WAIT_S, check=True)
        (tmp_path / name).write_bytes(said.stdout + said.stderr)
    (tmp_path / "second").write_text(second.stdout + second.stderr)
    left = dict(left_behind(tmp_path, servers))
    assert {name for secret in servers.secrets for name in places_of(secret, left)} == set()
    # The same search finds what is no secret, wherever a run keeps its recipe.
    found = places_of(servers.ledger, left)
    for place in ("plan", f"runs/{folder.name}/config.json", "runs/mlflow.db", "report.html", "prefect/prefect.db"):
        assert any(name.endswith(place) for name in found), place
    assert any(name.startswith("drafts/mlflow/") for name in found)
    assert any(name.startswith("ledger/") for name in left)
