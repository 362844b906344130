"""How a PostgreSQL server that many runs share divides itself: 1, 10 and 100 runs at once, none of which may starve.

    python benchmarks/concurrent_runs.py [--runs 1 10 100] [--json ...]

Each run has a ledger of its own name, a generator and a trainer rank, all of them emulated: they ask for all that the
ledger gives, and move no bytes. Server and clients share the computer's cores; clients are threads of four processes.
All runs begin at the same time and are stopped at the same time; what each has trained by then is compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import ledger as ledger_benchmark
from ledger_processes import BYTES_PER_TOKEN, POLL_S, TOKENS, publication
from machine import cpu_model

from infra.files.atomic import write_atomically
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import plan_step, resume_run
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.data_path import CheckpointRecord, SampleSlot, StepPlan

RESULT = Path(__file__).parent / "results" / "concurrent_runs.json"
PROCESSES, LEASED, STEP, CHECKPOINT_STEPS, MEASURED_S = 4, 8, 8, 25, 40.0
SAMPLES = {1: 40_000, 10: 10_000, 100: 2_000}
"""Of each run, by their number: more than it can train while it is measured."""


class EmulatedRun:
    """A generator and a trainer of a run of its own, until they are stopped."""

    def __init__(self, url: str, name: str, samples: int, stop: threading.Event):
        self._ledger, self._stop, self.trained = Ledger.open(url, name), stop, 0
        self._ledger.create_run(
            budget_bytes=64 * TOKENS * BYTES_PER_TOKEN, bytes_per_token=BYTES_PER_TOKEN, lease_seconds=120,
            max_attempts=3, order="strict",
        )  # fmt: skip
        slots = [SampleSlot(ordinal=i, sample=i, tokens=TOKENS) for i in range(samples)]
        self._incarnation = resume_run(self._ledger, lambda _: True, lambda _: True).incarnation
        self._ledger.open_epoch(self._incarnation, 0, slots)
        self._threads = [threading.Thread(target=what) for what in (self._generate, self._train)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._ledger.close()

    def _generate(self) -> None:
        leases = []
        while not self._stop.is_set():
            captured = [publication(self._ledger, lease) for lease in leases]
            _, leases, _ = self._ledger.exchange("generator", captured, LEASED, has_others=False)
            if not leases:
                time.sleep(POLL_S)

    def _train(self) -> None:
        step = 0
        while not self._stop.is_set():
            plan = plan_step(
                self._ledger, self._incarnation, 0, step + 1, ranks=1, micro_batches=1, samples_per_step=STEP
            )
            if not isinstance(plan, StepPlan):
                time.sleep(POLL_S)
                continue
            step = plan.step
            self._ledger.release(self._incarnation, 0, *(sample.ordinal for sample in plan.samples))
            if step % CHECKPOINT_STEPS == 0:
                record = CheckpointRecord(step=step, path="", manifest_hash="", incarnation=self._incarnation)
                self._ledger.commit(self._incarnation, record)
            self.trained += len(plan.samples)


def work(url: str, first: int, count: int, samples: int) -> None:
    stop = threading.Event()
    runs = [EmulatedRun(url, f"run-{first + index}", samples, stop) for index in range(count)]
    print("ready", flush=True)
    sys.stdin.readline()
    for run in runs:
        run.start()
    stop.wait(MEASURED_S)
    stop.set()
    for run in runs:
        run.join()
    print(json.dumps([run.trained for run in runs]), flush=True)


def measure(url: str, runs: int) -> dict[str, float]:
    """Samples per second of all runs together, and of the slowest and the fastest in relation to the mean."""
    processes = min(PROCESSES, runs)
    counts = [len(range(index, runs, processes)) for index in range(processes)]
    with ExitStack() as stack:
        started = []
        for index, count in enumerate(counts):
            command = [
                sys.executable,
                __file__,
                "--work",
                url,
                str(sum(counts[:index])),
                str(count),
                str(SAMPLES[runs]),
            ]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(started[-1].kill)
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        trained = [count for process in started for count in json.loads(process.communicate(timeout=600)[0])]
    mean = sum(trained) / runs
    assert max(trained) < SAMPLES[runs], "a run ended before it was stopped"
    return {
        "samples_per_s": round(sum(trained) / MEASURED_S, 1),
        "slowest_of_mean": round(min(trained) / mean, 3),
        "fastest_of_mean": round(max(trained) / mean, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=list(SAMPLES))
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        url, *numbers = options.work
        work(url, *map(int, numbers))
        return
    results = {}
    with tempfile.TemporaryDirectory() as temporary, ledger_benchmark.databases(Path(temporary)) as (_, urls):
        for runs in options.runs:
            results[str(runs)] = measure(urls["postgresql"].pop(), runs)
            print(runs, results[str(runs)], flush=True)
    conditions = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "leased": LEASED, "samples_per_step": STEP, "seconds": MEASURED_S,
    }  # fmt: skip
    write_atomically(options.json, json.dumps({**conditions, "by_runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
