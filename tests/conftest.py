"""Fixtures for all tests: the tiny target, trained once and kept in the cache, and runs prepared on it."""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from infra.config import TransportConfig
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.network.health import trouble
from infra.network.ports import HOST, reserved_port
from infra.pools.local import LocalPool
from infra.processes.process import Owner
from infra.processes.process import start as start_process
from infra.records.data_path import StoreRecord, TargetRecord
from infra.servers.postgres import PostgresServer
from infra.settings import reach_loopback_directly
from infra.transport.mooncake.environment import check_mooncake
from infra.transport.mooncake.store import start_store
from models.config.recipe import load_recipe

sys.path.append(str(Path(__file__).parent))  # test modules import emulated_device from this folder

from fast_processes import read_first, start_keeper

RECIPES = Path(__file__).parent.parent / "recipes"
TINY = RECIPES / "tiny.yaml"

# An example's time is that of a busy machine, as Hypothesis knows of CI by itself.
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"

MakeRun = Callable[..., RunFolder]


def pytest_configure(config: pytest.Config) -> None:
    """What the shell hands down, and our processes would inherit, decides no test."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored
    os.umask(0o022)
    for name in [name for name, value in os.environ.items() if name.lower().endswith("_proxy") and "socks" in value]:
        del os.environ[name]  # httpx needs a package for it
    reach_loopback_directly()
    gc.disable()  # what the test modules import stays, and is never searched for garbage
    atexit.register(gc.freeze)
    read_first()
    if config.getoption("numprocesses", None) and not os.environ.get("DRAFTSMITH_TEST_SPAWN"):
        start_keeper()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


# `make test` runs three of these groups at a time (pytest-xdist); tests that share servers, ports or SGLang's segments
# in /dev/shm are in one group. Long groups come first, and long tests come first within a group, because pytest-xdist
# assigns the next group to a worker when two tests of its present one are left, however long they take.
SERVED_METHODS = ("eagle3", "dflash", "dflash2", "dspark", "domino", "mtp")
GROUPS = {
    "sglang": (
        "models/export",
        "test_gpu_acceptance.py",
        "models/capture/sglang",
        "models/regeneration",
        "infra/serving/test_real_servers.py",  # its killed servers leave segments
        # What asks the one interpreter that has imported SGLang.
        *("models/test_preflight.py", "models/test_kept_sglang.py", "models/data/test_tools.py"),
        "models/benchmark/test_counter.py",
        *(f"models/drafts/{name}/test_{name}_sglang.py" for name in SERVED_METHODS),
    ),
    # Second, because its first tests need no tiny target, which another worker trains meanwhile on a new machine.
    "pools": ("infra/pools",),
    # What asks the one Prefect server with the project's deployments.
    "deployments": (
        "flows/test_deployment.py",
        "flows/test_promotion.py",
        "flows/test_watch_traffic.py",
        "flows/test_recovery.py",
        "flows/test_deploy_command.py",
    ),
    "flows": ("flows/test_retrain.py", "flows/test_one_gpu.py", "flows/test_own_data.py", "flows"),
    "tiny run": ("models/test_tiny_run.py",),
    "chaos": ("test_chaos.py", "models/decoding"),
    "training": ("models/training",),
    "rounds": ("infra/data_plane/test_rounds.py",),
}


def group_of(nodeid: str) -> str:
    """Name of the group that a test belongs to; its file's where that is alone."""
    place = _place(nodeid)
    return next((name for name, places in GROUPS.items() if place.startswith(places)), place)


def rank_in_group(nodeid: str) -> int:
    """Where a test's file or folder stands in its group."""
    places, place = GROUPS.get(group_of(nodeid), ()), _place(nodeid)
    return next((rank for rank, start in enumerate(places) if place.startswith(start)), 0)


def _place(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


class GroupScheduling(LoadScopeScheduling):
    """A group's tests run one after the other, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [*GROUPS, *sorted({group_of(item.nodeid) for item in items} - set(GROUPS))]
    items.sort(key=lambda item: (order.index(group_of(item.nodeid)), rank_in_group(item.nodeid)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in _forbidden_skips(terminalreporter):
        terminalreporter.write_line(f"skipped, but not listed in {ALLOWED_SKIPS.name}: {name}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and reporter is not None and _forbidden_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _forbidden_skips(reporter: pytest.TerminalReporter) -> list[str]:
    """In CI everything is there; on other machines a test may miss a Debian package or root's rights."""
    if not os.environ.get("CI"):
        return []
    allowed = {line for line in ALLOWED_SKIPS.read_text().splitlines() if line and not line.startswith("#")}
    return sorted({report.nodeid for report in reporter.stats.get("skipped", [])} - allowed)


@pytest.fixture(scope="session")
def tiny_target() -> TargetRecord:
    """The tiny target of recipes/tiny.yaml (about a minute the first time on a machine)."""
    from models.targets.prepare import prepare_target

    return prepare_target(load_recipe(TINY).target)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL, in memory: a disk's fsync is not what the tests are about."""
    with memory_folder() as folder:
        server = PostgresServer(folder / "postgres", Owner("tests", folder / "logs"))
        yield server
        server.stop()


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in shared memory that everybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="tests-of-draftsmith-", dir="/dev/shm"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def mooncake_store() -> Iterator[StoreRecord]:
    """A real Mooncake store on loopback, with room for 24 MiB: a container's shared memory has 64 MiB by default."""
    try:
        check_mooncake()
    except ValueError as error:
        pytest.skip(str(error))
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("infra.transport.mooncake.environment.BEYOND_BUDGET", 24 * 2**20)
        run = RunFolder(folder / "run")
        pool, config = LocalPool(Owner("tests", run.logs)), TransportConfig(budget_mib=1)
        with start_store(pool, run, config, folder, print):
            yield StoreRecord.read(run.store)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Nobody takes it before the server, whose start may take long, has bound it."""
    with reserved_port() as (port, _):
        yield port


@pytest.fixture(scope="session")
def s3_bucket(s3_port: int) -> Iterator[str]:
    """URL of an empty bucket on an S3 server of our own; this process and its children are let in."""
    port = s3_port
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    access = {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch, memory_folder() as folder:
        for name, value in access.items():
            patch.setenv(name, value)
        server = start_process("s3", command, Owner("tests", folder / "logs"), grace_s=1.0)
        deadline = time.monotonic() + 300
        while why := trouble(f"http://{HOST}:{port}/moto-api/", 10.0, direct=True):
            server.check()
            assert time.monotonic() < deadline, why
            time.sleep(0.1)
        fsspec.filesystem("s3").mkdir("draftsmith-tests")
        yield "s3://draftsmith-tests"
        server.stop()


@pytest.fixture(scope="session")
def own_namespaces() -> None:
    """Skips where the kernel gives a user no namespaces, as Ubuntu's from 23.10 on does by default."""
    asked = ["unshare", "--user", "--map-root-user", "--mount", "--net", "true"]
    if subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no namespaces for this user")


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """In shared memory; processes of nobody's may enter it."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def path_in_memory() -> Iterator[Path]:
    """For a `tmp_path` where SQLite would wait for a disk thousands of times: MLflow's tables take 6 s."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def session_in_memory() -> Iterator[Path]:
    """Like `path_in_memory`, once."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def mlflow_tables(session_in_memory: Path) -> Path:
    """MLflow's database with nothing in it."""
    from infra.tracking.client import connect

    database = session_in_memory / "tables" / "mlflow.db"
    connect(f"sqlite:///{database}")
    return database


@pytest.fixture
def registry_in_memory(mlflow_tables: Path, path_in_memory: Path) -> str:
    """Address of an MLflow of its own in `path_in_memory`."""
    return f"sqlite:///{shutil.copy(mlflow_tables, path_in_memory)}"


@pytest.fixture
def registry_uri(mlflow_tables: Path, tmp_path: Path) -> str:
    """Address of an MLflow of its own in `tmp_path`."""
    return f"sqlite:///{shutil.copy(mlflow_tables, tmp_path)}"


def prepare_run(path: Path, target: TargetRecord, *overrides: str) -> RunFolder:
    """A run folder of the tiny recipe, ready for generators and trainer."""
    from models.data.prepare import prepare_samples

    config = load_recipe(TINY, list(overrides))
    folder = RunFolder(path)
    write_atomically(folder.config, config)
    write_atomically(folder.target, target)
    write_atomically(folder.samples, prepare_samples(config.data, target, config.target.add_bos))
    return folder


@pytest.fixture
def make_run(tmp_path: Path, tiny_target: TargetRecord, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRun]:
    """Makes run folders of the tiny recipe: `make_run("name", "training.max_steps=3", ...)`."""
    # A folder of its own: nobody owns these runs, so a run that starts meanwhile would sweep them from /dev/shm.
    with memory_folder() as memory:
        monkeypatch.setenv("DRAFTSMITH_SHM", str(memory))
        yield lambda name, *overrides: prepare_run(tmp_path / name, tiny_target, *overrides)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetRecord) -> Callable[..., RunFolder]:
    """Gives a run of the tiny recipe with these overrides that nothing disturbed; it is trained once and only read."""
    from models.run import PreparedRun  # with torch

    @cache
    def finished(*overrides: str) -> RunFolder:
        folder = prepare_run(tmp_path_factory.mktemp("finished"), tiny_target, *overrides)
        with memory_folder() as memory, pytest.MonkeyPatch.context() as patch, processes() as start:
            patch.setenv("DRAFTSMITH_SHM", str(memory))
            train(start, folder)
            if not any("max_steps" in one for one in overrides):  # else samples are left that nobody took
                in_run_folder = folder.path / "objects"  # where shared memory is too small
                assert list(memory.iterdir()) or in_run_folder.is_dir(), "its objects were elsewhere"
                assert not list(PreparedRun.open(folder.path).open_transport().keys()), "objects that nobody released"
        return folder

    return finished


Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def processes() -> Iterator[Start]:
    """Starts modules on runs: `start("models.capture.generator", folder)`; none outlives the context."""
    started: list[subprocess.Popen[str]] = []

    def launch(module: str, folder: RunFolder, **options: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", module, str(folder.path)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    try:
        yield launch
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                print(*process.args[2:], "was still there:", process.communicate(timeout=120)[0])


@pytest.fixture
def start() -> Iterator[Start]:
    """See `processes`."""
    with processes() as launch:
        yield launch


@pytest.fixture
def without_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that suspend processes, or look into them: they do their own work."""
    monkeypatch.delenv("DRAFTSMITH_TEST_KEEPER", raising=False)


@pytest.fixture
def kill_tree() -> Callable[[int], None]:
    """SIGKILL for a process and everything below it."""

    def kill(pid: int) -> None:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # it died with its parent
                one.kill()

    return kill


def train(start: Start, folder: RunFolder) -> None:
    """Run a generator and a one-rank trainer on a prepared run until both have ended well."""
    generator, trainer = start("models.capture.generator", folder), start("models.training.launch", folder, ranks=1)
    with ThreadPoolExecutor(2) as threads:
        # At the same time: a trainer waits long for a generator that has died.
        ended = [threads.submit(process.communicate, timeout=900) for process in (generator, trainer)]
        output, _ = ended[0].result()
        if generator.returncode:
            trainer.kill()
        assert generator.returncode == 0, output
        output, _ = ended[1].result()
        assert trainer.returncode == 0, output


@pytest.fixture
def run_to_the_end(start: Start) -> Callable[[RunFolder], None]:
    """See `train`."""
    return partial(train, start)
