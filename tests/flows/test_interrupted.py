"""A run that is interrupted before it trains is resumed with the command that `status` prints. Real processes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra.records.data_path import TargetRecord

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from flows.command_line import main; main()"]
WAIT_S = 400.0
OPENED = "run folder: "
SMALL = [
    "data.max_samples=40",
    "training.max_steps=2",
    "training.samples_per_step=4",
    "benchmark.prompts=8",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=64",
    "benchmark.timed_tokens=16",
    "promotion.smoke_prompts=2",
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "shm").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | {
        "DRAFTSMITH_RUNS": str(tmp_path / "runs"),
        "DRAFTSMITH_SHM": str(tmp_path / "shm"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "COLUMNS": "400",
    }


@pytest.fixture
def interrupt(tmp_path: Path, environment: dict[str, str]) -> Callable[..., None]:
    """Runs a command until a process of the run runs a module, or the run holds a file, and then presses Ctrl-C.

    The module leaves the file: its process may come and go while this one gets no core.
    """

    def run(arguments: list[str], module: str, file: str) -> None:
        log = tmp_path / "output.txt"
        with log.open("a") as output:
            before = output.tell()
            process = subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=output)
        deadline = time.monotonic() + WAIT_S

        def reached() -> bool:
            if module and runs_module(process.pid, module):
                return True
            # An earlier command may have left the file: this one must have come as far as its run.
            came = file == "config.json" or OPENED in log.read_text()[before:]
            return came and any((tmp_path / "runs").glob(f"tiny-*/{file}"))

        while not reached():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130, log.read_text()[-4000:]

    return run


def runs_module(pid: int, module: str) -> bool:
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if module in child.cmdline():
                return True
    return False


def told_to(environment: dict[str, str]) -> list[str]:
    """The arguments of the command that `status` says to resume the run with."""
    said = subprocess.run(
        [*COMMAND, "status"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    found = re.search(r"resume it with: draftsmith (retrain --resume \S+)", said.stdout)
    assert found, said.stdout
    return found[1].split()


MOMENTS = (("", "config.json"), ("models.data.prepare", "samples.json"), ("", "ledger.sqlite"))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("moments", [MOMENTS[:2], pytest.param(MOMENTS, marks=pytest.mark.long)], ids=["two", "three"])
def test_a_run_that_was_interrupted_early_is_resumed_as_status_says(
    tmp_path: Path,
    environment: dict[str, str],
    interrupt: Callable[..., None],
    tiny_target: TargetRecord,
    moments: tuple[tuple[str, str], ...],
) -> None:
    arguments = ["retrain", "recipes/tiny.yaml", *SMALL]
    for module, file in moments:
        interrupt(arguments, module, file)
        arguments = told_to(environment)
    ended = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    (folder,) = (tmp_path / "runs").glob("tiny-*")
    assert ended.stdout.splitlines()[-1] == str(folder)
    assert (folder / "report.json").is_file()
