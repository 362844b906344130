"""A run belongs to one process, and leaves nothing in shared memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.logging import disable_run_logger

from infra.files.run_folder import newest_runs
from infra.refusal import Refusal
from infra.transport.choice import run_memory_folder
from models.config.recipe import RunConfig, load_recipe
from tasks.run import OpenRun, folder_of_flow_run, open_run

ROOT = Path(__file__).parents[2]
NOBODY = 65534
WAIT_S = 60.0

OWNER = """
import sys, time
from pathlib import Path
from prefect.logging import disable_run_logger
from infra.processes.process import start
from models.config.recipe import load_recipe
from tasks.run import open_run
with disable_run_logger(), open_run(load_recipe(Path("recipes/tiny.yaml")), "owned", create=True) as run:
    (run.owner.folders[0] / "objects").mkdir()
    start("sleeper", ["sleep", "600"], run.owner)
    print("open", flush=True)
    time.sleep(600)
"""

KILLED = """
import os, sys
from pathlib import Path
from prefect.logging import disable_run_logger
from models.config.recipe import load_recipe
from tasks.run import open_run
sys.addaudithook(lambda event, _: os._exit(9) if event == "fcntl.flock" else None)
with disable_run_logger(), open_run(load_recipe(Path("recipes/tiny.yaml")), None):
    pass
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    with disable_run_logger():
        yield tmp_path


@pytest.fixture
def config() -> RunConfig:
    return load_recipe(ROOT / "recipes" / "tiny.yaml")


def in_flow_run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(UUID(int=number)))


def test_new_runs_get_folders_of_their_own_and_remember_their_configuration(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flow_run(1, monkeypatch)
    with open_run(config, None) as one:
        in_flow_run(2, monkeypatch)
        with open_run(config, None) as two:
            assert one.folder.path != two.folder.path
            assert one.folder.name.startswith("tiny-")
            assert RunConfig.model_validate_json(one.folder.config.read_text()) == config
            assert run_memory_folder(one.folder).is_dir()
            assert one.draft_name == "draft-tiny"
    assert not run_memory_folder(one.folder).exists()
    in_flow_run(1, monkeypatch)
    with open_run(config, None) as again:
        assert again.folder.path == one.folder.path


@pytest.mark.parametrize("group", [0o755, 0o2755])
def test_other_users_do_not_enter_a_run_that_learns_from_users(
    group: int, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = places / "runs"
    runs.mkdir()
    runs.chmod(group)
    live = "{servers: [{address: 'http://127.0.0.1:1', socket: /run/a}], consent: users agreed, retention_days: 1}"
    settings = ["generator.engine=serving", f"generator.live={live}", "data.source=live", "data.max_samples=64"]
    settings += ["data.overlong=truncate", "training.start_from=champion"]
    in_flow_run(1, monkeypatch)
    with open_run(load_recipe(ROOT / "recipes" / "tiny.yaml", settings), None) as run:
        assert run.folder.path.stat().st_mode & 0o7777 == (0o2750 if group == 0o2755 else 0o700)


@pytest.mark.parametrize("closed", ["theirs/flow_run", "theirs"])
def test_a_run_that_another_user_keeps_to_itself_is_passed_over(
    closed: str, public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("theirs", "mine"):
        (public_folder / name).mkdir()
        for file in ("flow_run", "config.json"):
            (public_folder / name / file).write_text(name)
    (public_folder / closed).chmod(0)
    public_folder.chmod(0o755)
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(public_folder))
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setuid(NOBODY)
            mine, theirs = folder_of_flow_run("mine", None), folder_of_flow_run("theirs", None)
            listed = newest_runs(public_folder)
            os._exit(0 if mine and mine.name == "mine" and theirs is None and mine in listed else 1)
        finally:
            os._exit(2)
    ended = os.waitpid(child, 0)[1]
    (public_folder / closed).chmod(0o755)  # or it cannot be removed
    assert os.waitstatus_to_exitcode(ended) == 0


def test_runs_of_the_same_second_have_names_of_their_own_wherever_their_folders_lie(
    config: RunConfig, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that several machines share knows a run by its name alone."""
    monkeypatch.setattr(time, "strftime", lambda _format: "20260101-000000")
    names = set()
    for number in range(1, 4):
        monkeypatch.setenv("DRAFTSMITH_RUNS", str(places / f"machine-{number}" / "runs"))
        in_flow_run(number, monkeypatch)
        with open_run(config, None) as run:
            names.add(run.folder.name)
    assert len(names) == 3


def test_a_run_folder_appears_with_its_configuration(
    config: RunConfig, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed before it takes the run's lock leaves a run that can be resumed."""
    in_flow_run(1, monkeypatch)
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, timeout=400, check=False)
    assert killed.returncode == 9
    (folder,) = (places / "runs").iterdir()
    assert RunConfig.model_validate_json((folder / "config.json").read_text()) == config


def test_of_two_that_open_a_run_one_says_so(config: RunConfig) -> None:
    with open_run(config, "same", create=True):
        with pytest.raises(ValueError, match="run same is owned by another process"), open_run(config, "same"):
            pass
    with open_run(config, "same"):
        pass


@pytest.mark.parametrize("name", ["mistyped", ".stack", "mlflow-artifacts", "x" * 300])
def test_a_name_without_a_run_starts_none(name: str, config: RunConfig, places: Path) -> None:
    for other in (".stack", "mlflow-artifacts"):
        (places / "runs" / other).mkdir(parents=True)
    with pytest.raises(Refusal, match=f"no run {name[:200]}: neither a run folder's path nor"), open_run(config, name):
        pass
    assert list((places / "runs").rglob("*config.json")) == []


def test_a_flow_run_that_is_resumed_waits_for_its_first_process(
    config: RunConfig, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's Suspend acts at the end of a step, and its Resume starts a second process at once."""
    waits, opened = threading.Event(), list[str]()
    monkeypatch.setattr("tasks.run.get_run_logger", lambda: SimpleNamespace(info=lambda *_said: waits.set()))
    with open_run(config, "suspended", create=True):
        pass
    in_flow_run(2, monkeypatch)

    def resume() -> None:
        with open_run(config, "suspended") as again:
            opened.append(again.folder.name)

    second = threading.Thread(target=resume, daemon=True)
    with open_run(config, "suspended"):
        waits.clear()
        second.start()
        assert waits.wait(WAIT_S)
        assert opened == []
        in_flow_run(3, monkeypatch)
        with pytest.raises(Refusal, match="is owned by another process"), open_run(config, "suspended"):
            pass
    second.join(WAIT_S)
    assert opened == ["suspended"]


def test_a_run_that_failed_keeps_the_reason_until_it_is_opened_again(config: RunConfig) -> None:
    with pytest.raises(Refusal), open_run(config, "lost", create=True) as opened:
        raise Refusal("no text at s3://me:secret@host/x: check the address")
    assert opened.folder.failure.read_text() == "no text at s3://me:***@host/x: check the address\n"
    with open_run(config, "lost"):
        assert not opened.folder.failure.exists()
    with pytest.raises(KeyboardInterrupt), open_run(config, "lost"):
        raise KeyboardInterrupt
    assert not opened.folder.failure.exists()


def test_an_error_is_not_hidden_where_nothing_can_be_written(config: RunConfig) -> None:
    def fail(opened: OpenRun) -> None:
        opened.folder.failure.mkdir()
        raise Refusal("the error itself")

    with pytest.raises(Refusal, match="the error itself"), open_run(config, "full", create=True) as opened:
        fail(opened)


def test_a_run_keeps_its_configuration(config: RunConfig) -> None:
    with open_run(config, "same", create=True):
        pass
    other = config.model_copy(update={"seed": 1})
    with pytest.raises(ValueError, match="belongs to another configuration"), open_run(other, "same"):
        pass


def test_a_killed_owners_run_can_be_opened_and_its_memory_is_gone(config: RunConfig, places: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        objects = places / "shm" / "draftsmith-owned" / "objects"
        assert objects.is_dir()
        owner.send_signal(signal.SIGKILL)
    with open_run(config, "owned") as run:
        assert not objects.exists()
        assert [path.name for path in run.owner.folders[0].iterdir()] == ["lock"]
    assert list((places / "shm").iterdir()) == []


def test_objects_that_do_not_fit_shared_memory_stay_in_the_run_folder(config: RunConfig) -> None:
    huge = config.model_copy(update={"transport": config.transport.model_copy(update={"budget_mib": 2**40})})
    with open_run(huge, "huge", create=True) as run:
        assert run.owner.folders == ()
    assert run.folder.path.is_dir()


@pytest.mark.parametrize("name", ["..", "../elsewhere", "a/../../b", ".", "/"])
def test_a_name_leads_nowhere_else(name: str, config: RunConfig) -> None:
    with pytest.raises(ValueError, match="is not the name of a run"), open_run(config, name):
        pass
