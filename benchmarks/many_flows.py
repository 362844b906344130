"""What flow and Prefect cost where many runs share a stack: runs at once, whose data plane is played back.

    python benchmarks/many_flows.py [--runs 1 10 40] [--json ...]

First a small run is made, and what its processes write is recorded. Then the given number of `draftsmith retrain`
commands start at the same time, each for its own draft, on one Prefect, one MLflow and one PostgreSQL server. All of
each flow is real: engine, tasks, locks, supervisors, tracking, registry, gate, report; only the modules that would
compute (`python -m models...`) wait as long as they took and copy what they wrote (`playback.py`). Trainings last until
all runs train; then everything is watched for a while, trainings end together, and the runs go on to their end.

`cpu_s` are CPU seconds per run, of the command's own process and of each server. `watched` are loads while all train:
cores per run. `end_s` is the time from the end of the trainings to a run's end. All share this computer's cores.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean

import psutil
from machine import cpu_model
from overhead import SMALL

from infra.files.atomic import write_atomically
from infra.network.ports import lasting_ports
from infra.processes.exit import run_main
from infra.processes.process import Owner, Process
from infra.provenance import git_sha, hardware, versions
from infra.servers.local import new_credential, start_mlflow, start_prefect, wait_until_up
from infra.servers.postgres import PostgresServer

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "many_flows.json"
WATCHED_S, ENOUGH_S, POLL_S = 30.0, 1200.0, 0.5
BOOT = """
import sys
sys.executable = {python!r}
sys.argv = ["draftsmith", *sys.argv[1:]]
from flows.command_line import main
main()
"""
PYTHON = """#!/bin/sh
case "$1 $2" in "-m models.core_rate") ;; "-m models."*) exec {python} -S {playback} "$@" ;; esac
exec {python} "$@"
"""


@contextmanager
def servers(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, Process]]]:
    """A stack's servers: environment of those who use them, and processes by name."""
    owner, credential = Owner("many-flows", folder / "logs"), new_credential()
    with ExitStack() as stack:
        postgres = PostgresServer(folder / "postgres", owner)
        stack.callback(postgres.process.stop)
        prefect_port, mlflow_port = lasting_ports(2)
        database = postgres.make_database("prefect").replace("postgresql+psycopg:", "postgresql+asyncpg:")
        flows = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database}
        drafts = {
            "MLFLOW_BACKEND_STORE_URI": postgres.make_database("mlflow"),
            "MLFLOW_DEFAULT_ARTIFACT_ROOT": (folder / "artifacts").as_uri(),
            "MLFLOW_SERVE_ARTIFACTS": "false",
        }
        prefect = start_prefect(owner, prefect_port, credential, flows)
        stack.callback(prefect.process.stop)
        mlflow = start_mlflow(owner, mlflow_port, drafts)
        stack.callback(mlflow.process.stop)
        assert wait_until_up([prefect, mlflow])
        environment = {
            "PREFECT_API_URL": f"{prefect.address}/api",
            "PREFECT_API_AUTH_STRING": credential,
            "MLFLOW_TRACKING_URI": mlflow.address,
        }
        yield environment, {"prefect": prefect.process, "mlflow": mlflow.process, "postgres": postgres.process}


class Flows:
    """Commands that run at the same time, and the CPU seconds of each."""

    def __init__(self, folder: Path, names: Sequence[str], environment: Mapping[str, str]):
        self._folder, self.cpu_s, self.ended = folder, dict.fromkeys(names, 0.0), dict[str, float]()
        self.bytes: dict[str, int] = {}
        python = folder / "python"
        self._running: dict[str, psutil.Popen] = {}
        for name in names:
            command = [
                sys.executable,
                "-c",
                BOOT.format(python=str(python)),
                "retrain",
                str(ROOT / "recipes/tiny.yaml"),
            ]
            with (folder / f"{name}.log").open("wb") as log:
                self._running[name] = psutil.Popen(
                    [*command, f"name={name}", *SMALL], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                )

    def look(self) -> bool:
        """Note what each has used; whether one still runs. Raises ValueError where one has failed."""
        for name, process in list(self._running.items()):
            try:
                times = process.cpu_times()
                self.cpu_s[name] = max(self.cpu_s[name], times.user + times.system)
                self.bytes[name] = max(self.bytes.get(name, 0), process.memory_info().rss)
            except psutil.Error:
                pass
            if process.poll() is not None:
                self.ended[name] = time.monotonic()
                del self._running[name]
                if process.returncode:
                    raise ValueError(f"{name} failed:\n{(self._folder / f'{name}.log').read_text()[-3000:]}")
        return bool(self._running)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()


def used(processes: Mapping[str, Process]) -> dict[str, float]:
    """CPU seconds of servers, with all that they have started."""
    found = {}
    for name, process in processes.items():
        everyone = psutil.Process(process.pid).children(recursive=True)
        found[name] = 0.0
        for one in everyone:
            try:
                times = one.cpu_times()
                found[name] += times.user + times.system + times.children_user + times.children_system
            except psutil.Error:
                continue
    return found


def together(
    count: int, folder: Path, environment: Mapping[str, str], processes: Mapping[str, Process]
) -> dict[str, object]:
    """Run `count` flows at the same time, and measure them."""
    (folder / "go").unlink(missing_ok=True)
    shutil.rmtree(folder / "training", ignore_errors=True)
    before, begun = used(processes), time.monotonic()
    flows = Flows(folder, [f"small-{count}-{number}" for number in range(count)], environment)
    with ExitStack() as stack:
        stack.callback(flows.close)
        while len(list((folder / "training").glob("*"))) < count:
            assert flows.look()
            assert time.monotonic() - begun < ENOUGH_S, "they do not all train"
            time.sleep(POLL_S)
        all_train = time.monotonic() - begun
        first = used(processes) | {"command": sum(flows.cpu_s.values())}
        watched = time.monotonic() + WATCHED_S
        while time.monotonic() < watched:
            assert flows.look()
            time.sleep(POLL_S)
        second = used(processes) | {"command": sum(flows.cpu_s.values())}
        (folder / "go").touch()
        going = time.monotonic()
        while flows.look():
            assert time.monotonic() - going < ENOUGH_S, "they do not all end"
            time.sleep(POLL_S)
    ends = [at - going for at in flows.ended.values()]
    spent = {name: seconds - before[name] for name, seconds in used(processes).items()}
    return {
        "all_train_s": round(all_train, 1),
        "cpu_s": {
            "command": round(mean(flows.cpu_s.values()), 2),
            **{name: round(seconds / count, 2) for name, seconds in spent.items()},
        },
        "watched": {name: round((second[name] - first[name]) / WATCHED_S / count, 4) for name in second},
        "command_mib": round(mean(flows.bytes.values()) / 2**20),
        "end_s": {"mean": round(mean(ends), 1), "slowest": round(max(ends), 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 40])
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    with tempfile.TemporaryDirectory(prefix="many-flows-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        python = folder / "python"
        python.write_text(PYTHON.format(python=sys.executable, playback=Path(__file__).with_name("playback.py")))
        python.chmod(0o755)
        with servers(folder) as (addresses, processes):
            own = {
                "PLAYBACK": str(folder),
                "DRAFTSMITH_RUNS": str(folder / "runs"),
                "PREFECT_HOME": str(folder / "home"),
            }
            environment = inherited | addresses | own
            recorded = Flows(folder, ["recorded"], environment)
            while recorded.look():
                time.sleep(POLL_S)
            (folder / "recorded").touch()
            by_runs = {}
            for count in options.runs:
                by_runs[str(count)] = together(count, folder, environment, processes)
                print(count, json.dumps(by_runs[str(count)]), flush=True)
    conditions = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "versions": versions(), "recipe": "tiny", "overrides": list(SMALL), "watched_s": WATCHED_S,
    }  # fmt: skip
    write_atomically(options.json, json.dumps({**conditions, "by_runs": by_runs}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
