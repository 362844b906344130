"""How many samples per second a ledger carries: real generator processes and a trainer, with no bytes between them.

    python benchmarks/ledger.py [--samples 2000] [--generators 1,4,8] [--json benchmarks/results/ledger.json]

Every sample is leased, published, planned, released and committed as in a run; SQLite lies on this machine's disk with
its full synchronisation, PostgreSQL is a server of its own with its default durability. One after the other in one run.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.files.atomic import write_atomically
from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import Wait, plan_step, resume_run
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.records.data_path import BufferRecord, CheckpointRecord, ObjectRecord, SampleSlot, StepPlan
from infra.servers.postgres import PostgresServer

RESULT = Path(__file__).parent / "results" / "ledger.json"
TOKENS = 550
BYTES_PER_TOKEN = 32 * 2**10
SAMPLES_PER_STEP, CHECKPOINT_STEPS, LEASED = 32, 25, 8
WAIT_S = 300.0


def generate(url: str, owner: str) -> None:
    """One generator whose captures take no time."""
    with Ledger.open(url, "benchmark") as ledger:
        while not ledger.finished():
            for lease in ledger.lease(owner, LEASED):
                buffer = BufferRecord(name="aux", nbytes=lease.nbytes, xxh3="")
                record = ObjectRecord(key=ledger.key(lease), location="", buffers=(buffer,))
                ledger.publish(Publication(lease, record))


def train(ledger: Ledger, samples: int) -> float:
    """Take every sample; seconds of it."""
    incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
    begun, step = time.perf_counter(), 1
    while samples:
        plan = plan_step(ledger, incarnation, 0, step, ranks=1, micro_batches=1, samples_per_step=SAMPLES_PER_STEP)
        if isinstance(plan, Wait):
            assert time.perf_counter() - begun < WAIT_S, plan
            continue
        assert isinstance(plan, StepPlan)
        ledger.release(incarnation, 0, *(sample.ordinal for sample in plan.samples))
        samples -= len(plan.samples)
        if step % CHECKPOINT_STEPS == 0 or not samples:
            record = CheckpointRecord(step=step, path=str(step), manifest_hash="", incarnation=incarnation)
            ledger.commit(incarnation, record)
        step += 1
    taken = time.perf_counter() - begun
    ledger.finish(incarnation)
    return taken


def measure(url: str, samples: int, generators: int) -> float:
    """Samples per second."""
    slots = [SampleSlot(ordinal=i, sample=i, tokens=TOKENS) for i in range(samples)]
    with Ledger.open(url, "benchmark") as ledger:
        ledger.create_run(
            budget_bytes=8 * SAMPLES_PER_STEP * TOKENS * BYTES_PER_TOKEN,
            bytes_per_token=BYTES_PER_TOKEN,
            lease_seconds=120,
            max_attempts=3,
            order="any",
        )
        ledger.open_epoch(None, 0, slots)
        command = [sys.executable, __file__, "--generate", url]
        processes = [subprocess.Popen([*command, f"generator-{index}"]) for index in range(generators)]
        try:
            return samples / train(ledger, samples)
        finally:
            for process in processes:
                process.kill() if process.poll() is None and not ledger.finished() else process.wait(WAIT_S)


@contextmanager
def databases(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Makers of empty databases: their URLs, to be used up."""
    public = folder / "public"
    public.mkdir()
    folder.chmod(0o755)
    server = PostgresServer(public / "postgres", Owner("benchmark", folder / "logs"))
    try:
        yield {
            "sqlite": [f"sqlite:///{folder}/{index}.sqlite" for index in range(9)],
            "postgresql": [server.make_database(f"ledger{index}") for index in range(9)],
        }
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--generators", default="1,4,8")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--generate", nargs=2, metavar=("URL", "OWNER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate:
        generate(*options.generate)
        return
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-ledger-"))
    rates: dict[str, dict[str, float]] = {}
    with databases(folder) as urls:
        for generators in options.generators.split(","):
            for name, free in urls.items():
                rate = measure(free.pop(), options.samples, int(generators))
                rates.setdefault(name, {})[generators] = round(rate, 1)
                print(f"{name}, {generators} generators: {rate:.0f} samples/s", flush=True)
    shutil.rmtree(folder)
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "samples": options.samples,
        "samples_per_step": SAMPLES_PER_STEP,
        "samples_per_lease": LEASED,
        "samples_per_s_by_generators": rates,
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
