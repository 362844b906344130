"""What a flow costs beside the work that it orders: seconds in which no data-plane process ran.

    python benchmarks/overhead.py [--recipe recipes/tiny.yaml] [--after 3] [section.field=value ...]

`draftsmith retrain` is run with databases of its own that are not there yet (Prefect's and MLflow's: tables are made),
then again `--after` times over the same ones. Target and samples lie in the cache before. The overhead of a run is

    wall time of the command, interpreter start to exit
    - the union of the intervals in which a supervisor of a data-plane command (`python -m models...`) lived.

Starts of supervisors are the kernel's, ends are those of a pidfd, so both are exact to some milliseconds. What remains
is orchestration: imports, Prefect's server, its engine and its client calls, and the tasks' own work between processes:
MLflow, the registry, the report. The parts come from the times of the task runs in Prefect's database:

`before the flow`: command start to the flow run's start: imports, versions, the server (`server`: its process start to
    the first time its port is open), the first client calls.
`in tasks`: inside task runs, with no data-plane process; by task where it is more than a tenth of a second.
`between tasks`: inside the flow run, outside of task runs and data-plane processes: engine, locks.
`after the flow`: flow run's end to the command's: logs are sent, the server is stopped.

CPU seconds are those of the command's process and of the server's: where other work shares the cores, wall times grow
and these do not (much).
"""

import argparse
import json
import os
import select
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "overhead.json"
SMALL = (
    *("training.max_steps=20", "training.samples_per_step=4", "training.log_steps=10"),
    *("benchmark.prompts=8", "benchmark.max_new_tokens=16", "benchmark.reference_tokens=32"),
    "benchmark.timed_tokens=16",
)
COMMAND = [sys.executable, "-c", "from flows.command_line import main; main()", "retrain"]
RUN_S = 900.0
LOOK_S = 0.05
SHOWN_S = 0.1

Interval = tuple[float, float]
"""Seconds since the epoch."""


@dataclass
class Watched:
    """What was seen of the command and its children."""

    begun: float
    ended: float = 0.0
    data_plane: list[Interval] = field(default_factory=list)
    server: Interval | None = None
    cpu_s: dict[str, float] = field(default_factory=dict)


class Watch:
    """Looks at a running command until it ends."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path):
        self.seen = Watched(time.time())
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        self._living: dict[int, tuple[int, float, list[str]]] = {}
        """By descriptor: process id, start, command line of a supervisor."""
        self._known: set[int] = set()

    def run(self) -> Watched:
        """Raises ValueError when the command fails, TimeoutError when it does not end."""
        deadline = time.monotonic() + RUN_S
        me = os.pidfd_open(self.process.pid)
        while True:
            readable, _, _ = select.select([me, *self._living], [], [], LOOK_S)
            now = time.time()
            for descriptor in readable:
                if descriptor != me:
                    self._ended(descriptor, now)
            if me in readable:
                break
            self._look()
            if time.monotonic() > deadline:
                self.process.kill()
                raise TimeoutError(f"the run did not end within {RUN_S:g} s")
        self.seen.ended = now
        for descriptor in [me, *self._living]:
            os.close(descriptor)
        if self.process.wait():
            raise ValueError("the run failed")
        return self.seen

    def _look(self) -> None:
        try:
            command = psutil.Process(self.process.pid)
            self._count("command", command)
            for child in command.children():
                if child.pid not in self._known:
                    self._begun(child)
        except psutil.Error:
            return
        for pid, _, line in self._living.values():
            if "prefect" in line:
                self._look_at_server(pid, int(line[line.index("--port") + 1]))

    def _begun(self, child: psutil.Process) -> None:
        line = child.cmdline()
        if "--grace" not in line:  # between fork and exec, or no supervisor
            return
        self._known.add(child.pid)
        self._living[os.pidfd_open(child.pid)] = (child.pid, started(child.pid), line)

    def _ended(self, descriptor: int, now: float) -> None:
        _, start, line = self._living.pop(descriptor)
        os.close(descriptor)
        if any(part.startswith("models.") for part in line):
            self.seen.data_plane.append((start, now))

    def _look_at_server(self, supervisor: int, port: int) -> None:
        try:
            for process in psutil.Process(supervisor).children():
                self._count("server", process)
                if self.seen.server is None:
                    with socket.socket() as probe:
                        if probe.connect_ex(("127.0.0.1", port)) == 0:
                            self.seen.server = (started(process.pid), time.time())
        except psutil.Error:
            return

    def _count(self, name: str, process: psutil.Process) -> None:
        times = process.cpu_times()
        self.seen.cpu_s[name] = times.user + times.system


def started(pid: int) -> float:
    """When a process was started, in seconds since the epoch; psutil knows the boot to whole seconds only."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time, as intervals that do not touch, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def outside(span: Interval, busy: Sequence[Interval]) -> float:
    """Seconds of `span` in none of `busy`, which are disjoint."""
    inside = sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in busy)
    return span[1] - span[0] - inside


def runs_in_database(file: Path, table: str) -> list[tuple[str, Interval]]:
    """Name and interval of a table's runs, oldest first."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        rows = database.execute(f"SELECT name, start_time, end_time FROM {table} ORDER BY start_time").fetchall()

    def seconds(text: str) -> float:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()

    return [(name, (seconds(start), seconds(end))) for name, start, end in rows]


def split(seen: Watched, database: Path) -> dict[str, object]:
    """Where the seconds went."""
    (_, flow) = runs_in_database(database, "flow_run")[-1]
    tasks = [(name, span) for name, span in runs_in_database(database, "task_run") if span[0] >= flow[0]]
    busy = union(seen.data_plane)
    in_tasks = {name.rpartition("-")[0]: outside(span, busy) for name, span in tasks}
    known = union([*busy, *(span for _, span in tasks)])
    server = seen.server
    wall = (seen.begun, seen.ended)
    return {
        "wall_s": round(wall[1] - wall[0], 2),
        "data_plane_s": round(sum(end - start for start, end in busy), 2),
        "overhead_s": round(outside(wall, busy), 2),
        "before_the_flow_s": round(flow[0] - wall[0], 2),
        "server_s": round(server[1] - server[0], 2) if server else None,
        "in_tasks_s": round(sum(in_tasks.values()), 2),
        "between_tasks_s": round(outside(flow, known), 2),
        "after_the_flow_s": round(wall[1] - flow[1], 2),
        "tasks_s": {name: round(taken, 2) for name, taken in in_tasks.items() if taken > SHOWN_S},
        "cpu_s": {name: round(taken, 2) for name, taken in seen.cpu_s.items()},
        "processes": len(seen.data_plane),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--after", type=int, default=3, help="runs over the databases of the first")
    parser.add_argument("--beside", default="nothing", help="what else the machine did, for the record")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    overrides = [*SMALL, *options.overrides]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    found: dict[str, list[dict[str, object]]] = {"new database": [], "after": []}
    with tempfile.TemporaryDirectory(prefix="draftsmith-overhead-") as name:
        home = Path(name)
        with prepared_run(home / "prepared", options.recipe, overrides):
            pass  # target and samples are in the cache now
        environment = inherited | {"DRAFTSMITH_RUNS": str(home / "runs"), "PREFECT_HOME": str(home / "prefect")}
        for number in range(1 + options.after):
            log = home / f"{number}.log"
            watch = Watch([*COMMAND, str(options.recipe.absolute()), *overrides], environment, log)
            try:
                seen = watch.run()
            except ValueError as error:
                raise ValueError(f"{error}:\n{log.read_text()[-4000:]}") from error
            what = "after" if number else "new database"
            found[what].append(split(seen, home / "prefect" / "prefect.db"))
            print(what, json.dumps(found[what][-1]), flush=True)
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "beside": options.beside,
        "versions": versions(),
        "recipe": options.recipe.stem,
        "overrides": overrides,
        "runs": found,
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
