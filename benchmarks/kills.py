"""After a kill: how soon are the GPUs free, does the run go on, and how soon?

    python benchmarks/kills.py [--json benchmarks/results/kills.json]

A whole stack (`draftsmith up`) with the deployments of prefect.yaml, and retrainings of the tiny target that lease two
GPUs by name (a name is enough for a lock; nothing computes on them). In the middle of training processes are killed by
SIGKILL. Then it is measured, in seconds from the kill: until nothing of the run lives any more and both locks are free
(`pool_free_s`), until the queue that Prefect shows has its places back (`queue_free_s`), until another flow run trains
the same run (`goes_on_s`) - no person does anything - and the state that it ends in.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from prefect_requests import ask
from soak import draftsmith, environment_of

from infra.files.atomic import write_atomically
from infra.files.locks import LockHeldError, hold
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.pools.local import LOCKS
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from models.config.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "kills.json"
GPUS = ("GPU-fake-a", "GPU-fake-b")
"""What leases them computes on the CPU (tests/every_process)."""
WAIT_S = 900.0
POLL_S = 0.25
STEPS, SAMPLES_PER_STEP = 240, 4
RECIPE = [
    "pools.inference_gpus=1",
    "pools.training_gpus=1",
    "data.max_tokens=64",
    f"training.max_steps={STEPS}",
    f"training.samples_per_step={SAMPLES_PER_STEP}",
    "training.checkpoint_steps=10",
    "benchmark.prompts=8",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=64",
    "benchmark.timed_tokens=16",
    "promotion.smoke_prompts=2",
]
BARS = {"the flow": 90.0, "worker and flow": 180.0}
"""Seconds until the pool is free."""


@dataclass
class Kill:
    """What came of one."""

    killed: str
    pool_free_s: float
    queue_free_s: float
    goes_on_s: float
    ended: str
    seconds_to_the_end: float


def api(path: str, body: dict[str, Any] | None = None) -> Any:
    return ask(path, body)


def until(condition: Callable[[], Any], what: str) -> float:
    """Seconds that it took. Raises TimeoutError."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > WAIT_S:
            raise TimeoutError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(POLL_S)
    return time.monotonic() - begun


def processes(found: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    chosen = []
    for process in psutil.process_iter():
        try:
            if found(process):
                chosen.append(process)
        except psutil.Error:
            continue
    return chosen


def flow_of(flow_run: str) -> list[psutil.Process]:
    """The process of a flow run."""
    return processes(
        lambda process: (
            "prefect.engine" in process.cmdline() and process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run
        )
    )


def workers(runs: Path) -> list[psutil.Process]:
    """Those of the stack's pool that retrains."""
    return processes(
        lambda process: (
            process.cmdline()[3:7] == ["worker", "start", "--pool", "draftsmith"]
            and process.environ().get("DRAFTSMITH_RUNS") == str(runs)
        )
    )


def data_plane(folder: RunFolder) -> list[psutil.Process]:
    return processes(lambda process: str(folder.path) in process.cmdline())


def free() -> bool:
    """Whether nobody holds a lock of one of the GPUs."""
    try:
        for gpu in GPUS:
            with hold(LOCKS / f"{gpu}.lock"):
                pass
    except LockHeldError:
        return False
    return True


def consumed(folder: RunFolder) -> int:
    if not folder.ledger_file.exists():
        return 0
    with Ledger.open(folder.ledger_url, folder.name) as ledger:
        return ledger.progress().consumed


def queue_is_free() -> bool:
    limits = api("v2/concurrency_limits/filter", {})
    return all(limit["active_slots"] == 0 for limit in limits if not limit["name"].startswith("promotion"))


def runs_of(name: str) -> list[dict[str, Any]]:
    """All flow runs of a run, oldest first."""
    found = api("flow_runs/filter", {"flows": {"name": {"any_": ["retrain"]}}, "sort": "EXPECTED_START_TIME_ASC"})
    return [run for run in found if run["parameters"].get("run") == name]


def kill(killed: str, runs: Path) -> Kill:
    """One run, from its submission to its end."""
    folder = RunFolder(runs / killed.replace(" ", "-"))
    config = load_recipe(ROOT / "recipes/tiny.yaml", RECIPE)
    write_atomically(folder.config, config)  # a name is that of a run to resume
    deployed = api("deployments/name/retrain/retrain")
    parameters = {"config": config.model_dump(mode="json"), "run": folder.name}
    first = api(f"deployments/{deployed['id']}/create_flow_run", {"parameters": parameters})["id"]
    until(lambda: consumed(folder) > STEPS * SAMPLES_PER_STEP // 4, "a quarter of the samples")
    victims = flow_of(first) + (workers(runs) if killed.startswith("worker") else [])
    assert len(victims) == 1 + killed.startswith("worker"), victims
    for process in victims:
        process.kill()
    begun = time.monotonic()
    until(lambda: not data_plane(folder) and free(), "the pool")
    pool_free_s = time.monotonic() - begun
    until(queue_is_free, "the queue")
    queue_free_s, had = time.monotonic() - begun, consumed(folder)
    until(lambda: consumed(folder) > had, "the run to go on")
    goes_on_s = time.monotonic() - begun
    last = runs_of(folder.name)[-1]["id"]
    assert last != first
    until(lambda: api(f"flow_runs/{last}")["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED"), "its end")
    ended = api(f"flow_runs/{last}")["state"]["type"]
    found = Kill(killed, pool_free_s, queue_free_s, goes_on_s, ended, time.monotonic() - begun)
    print(found, flush=True)
    return found


def kills_in(folder: Path) -> list[Kill]:
    """Every kill on a stack of its own."""
    (folder / "shm").mkdir()
    runs = folder / "runs"
    os.environ |= {"DRAFTSMITH_RUNS": str(runs), "DRAFTSMITH_SHM": str(folder / "shm"), "PWD": str(folder)}
    os.environ |= {"PREFECT_HOME": str(folder / "prefect"), "DRAFTSMITH_GPUS": ",".join(GPUS)}
    os.environ["PYTHONPATH"] = str(ROOT / "tests" / "every_process")
    shutil.copy(ROOT / "prefect.yaml", folder)
    draftsmith(folder, "up", "--background")
    try:
        os.environ |= environment_of(folder)
        return [kill(killed, runs) for killed in BARS]
    finally:
        draftsmith(folder, "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-kills-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user where this one is root
    commit, found = git_sha(), kills_in(folder)
    result = {
        "kills": [asdict(one) | {"bar_s": BARS[one.killed]} for one in found],
        "commit": commit, "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "versions": versions(),
    }  # fmt: skip
    write_atomically(options.json, json.dumps(result, indent=2) + "\n")
    if not all(one.pool_free_s <= BARS[one.killed] and one.ended == "COMPLETED" for one in found):
        raise SystemExit(f"a bar was missed; logs and runs are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    run_main(main)
