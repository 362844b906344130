"""Whether a run with injected faults came out whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from faults.space import BALLAST
from two_hosts import on

from infra.files.atomic import sha256_file
from infra.files.locks import LockHeldError, hold
from infra.files.run_folder import RunFolder
from infra.records.data_path import SampleProgress, TrainingResult

if TYPE_CHECKING:
    from scenario import Scenario

DRIVER = Path(__file__).with_name("driver.py")
MARK = "CHAOS_RUN"
"""Environment variable that everything a run starts inherits, wherever it hides."""
KINDS = {
    "supervisor": "supervisor.py",
    "generator": "models.capture.generator",
    "rank": "models.training.trainer",
    "launcher": "models.training.launch",
    "store": "infra.transport.mooncake.store",
    "master": "mooncake_master",
}
ASK_S = 120
LAST_BYTES = 1500


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """Everything on this machine that a run's owners have started."""
    mark = f"{MARK}={folder.path}".encode()
    processes = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if mark in environment.split(b"\0") and not is_a(process, "driver.py"):
                processes.append(process)
        except (OSError, psutil.Error):
            continue
    return processes


def is_a(process: psutil.Process, mark: str) -> bool:
    return any(part.endswith(mark) for part in process.cmdline()[:6])


def kind_of(process: psutil.Process) -> str:
    """A key of KINDS, or the name of the program."""
    try:
        return next((kind for kind, mark in KINDS.items() if is_a(process, mark)), process.name())
    except psutil.Error:
        return "gone"


def trained_steps(folder: RunFolder) -> list[int]:
    """Steps in metrics.jsonl, in its order; lines that are not whole are left out."""
    steps = []
    for line in folder.metrics.read_bytes().splitlines() if folder.metrics.is_file() else []:
        try:
            steps.append(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return steps


def weights_hash(folder: RunFolder) -> str:
    checkpoint = folder.path / TrainingResult.read(folder.training).checkpoint
    return sha256_file(checkpoint / "draft.safetensors") + sha256_file(checkpoint / "averaged.safetensors")


def last_words(log: Path) -> str:
    """The end of a log, from its last mark on."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return text.rpartition("\x00")[2][-LAST_BYTES:]


def verdict(scenario: "Scenario", reference: str) -> list[str]:
    """What is wrong with a run that has ended; empty when nothing is. `reference`: an undisturbed run's weights."""
    folder = scenario.folder
    return [
        *_wrong_ledger(scenario),
        *_wrong_steps(scenario),
        *(["final weights differ from an undisturbed run's"] if weights_hash(folder) != reference else []),
        *_left_behind(scenario),
    ]


def _wrong_ledger(scenario: "Scenario") -> list[str]:
    hosts = scenario.ground.hosts
    asking = on(hosts and hosts.trainer, [sys.executable, str(DRIVER), str(scenario.folder.path), "--progress"])
    answer = subprocess.run(asking, check=False, capture_output=True, text=True, timeout=ASK_S)
    if answer.returncode:
        return [f"the ledger does not answer: {answer.stderr[-LAST_BYTES:]}"]
    states = SampleProgress.model_validate_json(answer.stdout)
    return (
        [] if states.model_copy(update={"attempts": 0}) == SampleProgress(consumed=scenario.samples) else [f"{states}"]
    )


def _wrong_steps(scenario: "Scenario") -> list[str]:
    steps, expected = trained_steps(scenario.folder), scenario.total_steps
    damage = [struck for struck in scenario.outcome.struck if "metrics.jsonl" in struck]
    # Damaged lines are nowhere else, and a run whose last step is committed writes none again.
    ended = any("at 100%" in struck for struck in damage)
    if damage and steps == sorted(set(steps)) and (ended or steps[-1:] == [expected]):
        return []
    return [] if steps == list(range(1, expected + 1)) else [f"steps: {steps}"]


def _left_behind(scenario: "Scenario") -> list[str]:
    left = []
    for process in processes_of(scenario.folder):
        ports = [c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        left.append(f"process left: {kind_of(process)}, listening at {ports}")
    left += [f"shared memory left: {path.name}" for path in scenario.memory.iterdir() if path.name != BALLAST]
    for lock in (scenario.folder.run_lock, scenario.folder.path / "processes.lock"):
        try:
            with hold(lock):
                pass
        except LockHeldError:
            left.append(f"lock left: {lock.name}")
    return left
