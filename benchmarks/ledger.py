"""How many samples per second a ledger carries: emulated generators and trainer ranks, with no bytes between them.

    python benchmarks/ledger.py [--samples 20000] [--kills 50] [--rows 100000 10000000]

Every sample is leased, published, planned, released and committed as in a run in strict order. SQLite lies on this
machine's disk with its full synchronisation; PostgreSQL is a server of its own with its default durability. Server,
generators and ranks share the machine's cores. Then a run in which generators, trainer and server are killed; and the
time of each operation in a ledger of few rows and of many, in turns.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from ledger_processes import (
    BYTES_PER_TOKEN,
    LEASED,
    RANKS,
    RUN,
    SAMPLES_PER_STEP,
    TOKENS,
    WAIT_S,
    next_plan,
    publication,
)
from machine import cpu_model
from postgres import kill as kill_server

from infra.files.atomic import write_atomically
from infra.ledger.ledger import Ledger
from infra.ledger.schema import samples as table
from infra.ledger.trainers import resume_run
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.records.data_path import CheckpointRecord, SampleSlot
from infra.servers.postgres import PostgresServer

RESULT = Path(__file__).parent / "results" / "ledger.json"
PROCESSES = Path(__file__).with_name("ledger_processes.py")
OPERATIONS = 100
T = TypeVar("T")


class Cluster:
    """The processes of a run."""

    def __init__(self, url: str, folder: Path, samples: int, generators: int, leased: int):
        self.url, self.folder, self.samples, self.leased = url, folder, samples, leased
        folder.mkdir()
        self.ledger = Ledger.open(url, RUN)
        create(self.ledger, generators, leased)
        self.ledger.open_epoch(None, 0, [SampleSlot(ordinal=i, sample=i, tokens=TOKENS) for i in range(samples)])
        self.generators = [self.start("generate", folder / f"generator-{i}", leased) for i in range(generators)]
        deadline = time.monotonic() + WAIT_S
        while not all((folder / f"generator-{i}").exists() for i in range(generators)):
            assert time.monotonic() < deadline, "the generators do not start"
            time.sleep(0.1)
        self.trainer = self.start("train", folder, samples)

    def start(self, *what: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROCESSES), str(what[0]), self.url, *map(str, what[1:])]
        with (self.folder / f"{what[0]}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, choice: random.Random, server: PostgresServer) -> str:
        """Kill something and start it again."""
        kind = choice.choices(["generator", "trainer", "server"], [7, 2, 1])[0]
        if kind == "server":
            kill_server(server)
            server.start()
        elif kind == "trainer":
            _kill(self.trainer)
            self.ledger.forget_crashes()  # or the third at one step ends the run, as it should
            self.trainer = self.start("train", self.folder, self.samples)
        else:
            index = choice.randrange(len(self.generators))
            _kill(self.generators[index])
            self.generators[index] = self.start("generate", self.folder / f"generator-{index}", self.leased)
        self.revive()
        return kind

    def revive(self) -> None:
        """Start again what a lost server ended."""
        if self.trainer.poll() not in (None, 0):
            self.ledger.forget_crashes()
            self.trainer = self.start("train", self.folder, self.samples)
        for index, process in enumerate(self.generators):
            if process.poll() not in (None, 0):
                self.generators[index] = self.start("generate", self.folder / f"generator-{index}", self.leased)

    def close(self) -> None:
        for process in (self.trainer, *self.generators):
            if process.poll() is None:
                _kill(process)
        self.ledger.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def create(ledger: Ledger, generators: int, leased: int) -> None:
    ledger.create_run(
        # As `check_budget` demands with a prefetch of two steps and 32 samples in flight.
        budget_bytes=(3 * SAMPLES_PER_STEP + generators * (leased + 32)) * TOKENS * BYTES_PER_TOKEN,
        bytes_per_token=BYTES_PER_TOKEN,
        lease_seconds=120,
        max_attempts=3,
        order="strict",
    )


def measure(url: str, folder: Path, samples: int, generators: int, leased: int) -> float:
    """Samples per second from the first tenth to the last sample, when all processes have started."""
    cluster, begun = Cluster(url, folder, samples, generators, leased), 0.0
    try:
        while cluster.trainer.poll() is None:
            time.sleep(0.2)
            trained = sum(cluster.ledger.progress().model_dump(include={"taken", "consumed"}).values())
            if not begun and trained >= samples / 10:
                begun, first = time.perf_counter(), trained
        assert cluster.trainer.returncode == 0, (folder / "train.log").read_text()
        assert begun, "the run was too short to be measured"
        return (samples - first) / (time.perf_counter() - begun)
    finally:
        cluster.close()


def killed(url: str, folder: Path, samples: int, kills: int, server: PostgresServer) -> dict[str, object]:
    """Kills at places that a seed chooses; every sample must have been trained once."""
    choice, cluster, done = random.Random(0), Cluster(url, folder, samples, 8, LEASED), Counter[str]()
    places = sorted(choice.randrange(samples) for _ in range(kills))
    most, begun = 0, time.monotonic()
    try:
        while cluster.trainer.poll() != 0:
            assert time.monotonic() - begun < WAIT_S, "the run does not end"
            time.sleep(0.02)
            cluster.revive()
            there = cluster.ledger.progress()
            most = max(most, there.bytes_held)
            if places and there.taken + there.consumed >= places[0]:
                places.pop(0)
                done[cluster.kill(choice, server)] += 1
        record = cluster.ledger.checkpoints()[-1]
        seen = Counter(json.loads(Path(record.path).read_text()))
        assert seen == Counter(range(samples)), "a sample was lost or trained twice"
        assert cluster.ledger.progress().consumed == samples
        budget = (3 * SAMPLES_PER_STEP + 8 * (LEASED + 32)) * TOKENS * BYTES_PER_TOKEN
        assert most <= budget
        return {"kills": dict(done), "samples": samples, "every_sample_once": True, "budget_used": most / budget}
    finally:
        cluster.close()


def fill(ledger: Ledger, rows: int) -> None:
    """A run in the middle of an epoch: half of its samples are consumed."""
    create(ledger, 32, LEASED)
    dialect = ledger._engine.dialect.name
    series = f"generate_series(0, {rows - 1}) AS n(i)" if dialect == "postgresql" else (
        f"(WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {rows - 1}) SELECT i FROM n)"
    )  # fmt: skip
    state = f"CASE WHEN i < {rows // 2} THEN 'consumed' ELSE 'pending' END"
    step = f"CASE WHEN i < {rows // 2} THEN i / {SAMPLES_PER_STEP} + 1 END"
    columns = "run, epoch, ordinal, sample, tokens, state, step, attempt, failures, bytes_held, prefill_s, put_s"
    with ledger._engine.begin() as connection:
        values = f"'{RUN}', 0, i, i, {TOKENS}, {state}, {step}, 1, 0, 0, 0.1, 0.01"
        connection.exec_driver_sql(f"INSERT INTO {table.name} ({columns}) SELECT {values} FROM {series}")
    with ledger._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("ANALYZE"))


class Growing:
    """One ledger, and the times of its operations in milliseconds."""

    def __init__(self, url: str, rows: int):
        self.ledger, self.rows = Ledger.open(url, RUN), rows
        fill(self.ledger, rows)
        self.incarnation = resume_run(self.ledger, lambda _: True, lambda _: True).incarnation
        self.step, self.times = rows // 2 // SAMPLES_PER_STEP + 2, dict[str, list[float]]()

    def timed(self, name: str, operation: Callable[[], T]) -> T:
        begun = time.perf_counter()
        answer = operation()
        self.times.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))
        return answer

    def once(self) -> None:
        """One step from lease to commit."""
        ledger, size = self.ledger, SAMPLES_PER_STEP
        leases = self.timed("lease", lambda: ledger.lease("generator", size))
        offered = [publication(ledger, lease) for lease in leases]
        assert not self.timed("publish", lambda: ledger.publish(*offered))
        self.step += 1
        plan = self.timed("plan", lambda: next_plan(ledger, self.incarnation, self.step))
        ordinals = [sample.ordinal for sample in plan.samples]
        self.timed("release", lambda: ledger.release(self.incarnation, 0, *ordinals))
        record = CheckpointRecord(step=self.step, path="", manifest_hash="", incarnation=self.incarnation)
        assert self.timed("commit", lambda: ledger.commit(self.incarnation, record)) == size
        self.timed("renew", lambda: ledger.renew("generator"))
        self.timed("oldest", ledger.oldest)
        self.timed("last_capture", ledger.last_capture)
        self.timed("capture_rates", lambda: ledger.capture_rates(60.0))

    def medians(self) -> dict[str, float]:
        self.timed("progress", self.ledger.progress)
        return {name: round(statistics.median(times), 3) for name, times in self.times.items()}


def growth(urls: list[str], rows: list[int]) -> dict[str, dict[str, float]]:
    """Median milliseconds of each operation by the number of rows."""
    ledgers = [Growing(urls.pop(), count) for count in rows]
    for _ in range(OPERATIONS):
        for each in ledgers:
            each.once()
    found = {str(each.rows): each.medians() for each in ledgers}
    for each in ledgers:
        each.ledger.close()
    return found


@contextmanager
def databases(folder: Path) -> Iterator[tuple[PostgresServer, dict[str, list[str]]]]:
    """Makers of empty databases: their URLs, to be used up."""
    public = folder / "public"
    public.mkdir()
    folder.chmod(0o755)
    server = PostgresServer(public / "postgres", Owner("benchmark", folder / "logs"))
    try:
        urls = {
            "sqlite": [f"sqlite:///{folder}/{index}.sqlite" for index in range(9)],
            "postgresql": [server.make_database(f"ledger{index}") for index in range(9)],
        }
        yield server, urls
    finally:
        server.stop()


def compare(options: argparse.Namespace) -> None:
    """Measure everything, one after the other."""
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-ledger-"))
    result: dict[str, object] = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "samples": options.samples, "ranks": RANKS, "samples_per_step": SAMPLES_PER_STEP, "order": "strict",
    }  # fmt: skip
    with databases(folder) as (server, urls):
        rates: dict[str, float] = {}
        for leased in options.leased:
            for name, generators in (("sqlite", 1), ("sqlite", 4), ("postgresql", 4), ("postgresql", 32)):
                label = f"{name}, {generators} generators, {leased} samples leased at a time"
                rates[label] = round(measure(urls[name].pop(), folder / label, options.samples, generators, leased), 1)
                print(f"{label}: {rates[label]:.0f} samples/s", flush=True)
        result["samples_per_s"] = rates
        if options.kills:
            result["killed"] = killed(urls["postgresql"].pop(), folder / "killed", 12_000, options.kills, server)
            print(result["killed"], flush=True)
        if options.rows:
            result["milliseconds_by_rows"] = {name: growth(urls[name], options.rows) for name in urls}
    shutil.rmtree(folder)
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--leased", nargs="*", type=int, default=[LEASED, 32])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", nargs="*", type=int, default=[100_000, 10_000_000])
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    compare(options)


if __name__ == "__main__":
    run_main(main)
