"""The plans for 8, 64 and 256 GPUs rehearsed: what control and data plane bear, and what ends first.

    python benchmarks/rehearsal.py [--gpus 8 64 256] [--json ...]

The product's generators run with an engine that captures at the plan's rate, against a real PostgreSQL and a real
Mooncake store in several parts; emulated ranks read, release and commit at the plan's rate. Scaled are: the time, by
the factor that the result names (all rates are divided by it); the bytes of a token (768 in place of 32,768, and so the
pieces into which Mooncake's objects are cut); the number of processes (up to eight generators share one, four read for
all ranks, at most four hold the store). The numbers of generators, of samples in a step, of leases in a group, of
objects and of their pieces are the plan's.

Each part's load at the plan's full rate is its demand over what it bears on this computer: PostgreSQL's samples per
second without a pace (`ledger.py`), Mooncake's master one core, a link of 400 Gbit/s, the flow five seconds for a look
at the ledger, MLflow 15 for an update.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import ledger as ledger_benchmark
import numpy as np
import psutil
from machine import cpu_model
from mlflow.tracking import MlflowClient
from postgres import recipe_url
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.ledger.pulse import pulse
from infra.ledger.schema import QUARANTINED
from infra.planner.traffic import samples_in_flight, stored_bytes_per_token, traffic
from infra.pools.local import LocalPool
from infra.processes.exit import run_main
from infra.processes.process import Owner, Process
from infra.provenance import git_sha, hardware
from infra.servers.postgres import PostgresServer
from infra.transport.mooncake.store import start_store
from models.run import PreparedRun

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "rehearsal.json"
PROCESSES = str(Path(__file__).with_name("rehearsal_processes.py"))
TOKENS, RATE, RANKS_PER_GENERATOR, MACHINE = 550, 50.0, 7, 8
"""Tokens of a sample; samples per second of a generator; GPUs that train for one; GPUs of a machine."""
TOKEN_BYTES = stored_bytes_per_token(3, 4096, "bfloat16", top_token=False)
SCALED_BYTES = 768
LINK = 400e9 / 8
SLOWER = {8: 1.0, 64: 4.0, 256: 16.0}
STEPS = {8: 60, 64: 20, 256: 10}
PREFETCH = 2
LOOK_S, TRACKING_S = 5.0, 15.0
START_S, TRAIN_S = 300.0, 900.0


def write_samples(path: Path, count: int) -> None:
    dice = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(count):
            tokens = dice.integers(10, 900, TOKENS).tolist()
            file.write(json.dumps({"input_ids": tokens, "loss_mask": [0] * 10 + [1] * (TOKENS - 10)}) + "\n")


@contextmanager
def rehearsed_run(folder: Path, gpus: int, url: str) -> Iterator[PreparedRun]:
    generators = gpus // MACHINE
    ranks = generators * RANKS_PER_GENERATOR
    step = MACHINE * ranks
    source = folder / "samples.jsonl"
    write_samples(source, int(step * STEPS[gpus] / 0.97) + 40)
    in_flight = samples_in_flight(step, ranks, PREFETCH, generators * (max(8, min(32, generators)) + 32))
    settings = {
        "data.source": source,
        "data.max_tokens": TOKENS,
        "data.max_samples": step * STEPS[gpus],
        "data.heldout_share": 0.02,
        "generator.count": generators,
        "ledger.url": url,
        "training.ranks": ranks,
        "training.samples_per_step": step,
        "training.prefetch_steps": PREFETCH,
        "transport.kind": "mooncake",
        "transport.budget_mib": -(-in_flight * TOKENS * SCALED_BYTES // 2**20),
        "generator.stored_dtype": "bfloat16",
        "target.aux_layer_ids": "[1]",
    }
    recipe = ROOT / "recipes" / "tiny.yaml"
    with prepared_run(folder / "run", recipe, [f"{name}={value}" for name, value in settings.items()]) as run:
        assert run.layout.bytes_per_token == SCALED_BYTES
        yield run


class Used:
    """Core-seconds of some processes."""

    def __init__(self, processes: list[psutil.Process]):
        self._processes = processes

    def seconds(self) -> float:
        total = 0.0
        for process in self._processes:
            for one in (process, *process.children(recursive=True)):
                times = one.cpu_times()
                total += times.user + times.system
        return total


def launch(run: PreparedRun, what: str, *arguments: object) -> "subprocess.Popen[str]":
    log = (run.folder.logs / f"{what}-{'-'.join(map(str, arguments))}.log").open("w")
    command = [sys.executable, PROCESSES, what, str(run.folder.path), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


def wait_until_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", line


def watch(run: PreparedRun, trainer: "subprocess.Popen[str]", tracking: MlflowClient, tracked: str) -> dict[str, float]:
    """What the flow does meanwhile: the longest look at the ledger and update of MLflow, and the most bytes held."""
    most = {"look": 0.0, "update": 0.0, "held": 0.0}
    with run.open_ledger() as ledger:
        count, updated = 0, 0.0
        while trainer.poll() is None:
            begun = time.perf_counter()
            ledger.count(QUARANTINED)
            pulse(ledger)
            most["look"] = max(most["look"], time.perf_counter() - begun)
            most["held"] = max(most["held"], ledger.progress().bytes_held)
            if time.perf_counter() - updated > TRACKING_S:
                begun = updated = time.perf_counter()
                for name in ("loss", "acceptance", "tokens_per_s"):
                    tracking.log_metric(tracked, name, count, step=count)
                most["update"] = max(most["update"], time.perf_counter() - begun)
                count += 1
            try:
                trainer.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
    return most


def rehearse(gpus: int, folder: Path, server: PostgresServer, capacity: float) -> dict[str, Any]:
    generators, slower = gpus // MACHINE, SLOWER[gpus]
    ranks, machines = generators * RANKS_PER_GENERATOR, -(-generators * RANKS_PER_GENERATOR // MACHINE)
    plan = traffic(RATE * generators, TOKENS, TOKEN_BYTES, generators, ranks, machines)
    parts = min(4, machines)
    with ExitStack() as stack:
        run = stack.enter_context(rehearsed_run(folder, gpus, recipe_url(server, server_database(server, gpus))))
        run.folder.logs.mkdir(exist_ok=True)
        pool, transport = LocalPool(Owner("rehearsal", run.folder.logs)), run.config.transport
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rehearsal-"))
        store = stack.enter_context(
            start_store(pool, run.folder, transport, Path(memory), lambda _line: None, parts=parts)
        )
        master = Used([psutil.Process(cast(Process, store[0].process).pid)])
        sharing = min(8, generators)
        paced = plan.samples_per_s / slower
        trainer = launch(run, "train", paced, PREFETCH)
        stack.callback(trainer.kill)
        wait_until_ready(trainer)
        others = [launch(run, "generate", first, sharing, RATE / slower) for first in range(0, generators, sharing)]
        for process in others:
            stack.callback(process.kill)
            wait_until_ready(process)
        tracking = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        tracked = tracking.create_run("0").info.run_id
        before = master.seconds()
        most = watch(run, trainer, tracking, tracked)
        assert trainer.stdout is not None
        told = json.loads(trainer.stdout.read().splitlines()[-1])
        used = master.seconds() - before
    step, ended = run.config.training.samples_per_step, told["ended"]
    # The pipeline is full after its first steps.
    sustained = step * (len(ended) - 4) / (ended[-1] - ended[3]) * slower
    samples = run.samples.train_samples
    load = {
        "PostgreSQL": plan.samples_per_s / capacity,
        "Mooncake's master": plan.samples_per_s * used / samples,
        "a trainer machine's link": plan.store_link_bytes_per_s / LINK,
        "the flow's look at the ledger": most["look"] / LOOK_S,
        "MLflow": most["update"] / TRACKING_S,
    }
    first = max(load, key=lambda name: load[name])
    return {
        "generators": generators, "ranks": ranks, "machines_of_the_trainer": machines, "parts_of_the_store": parts,
        "time_slower_by": slower, "samples": samples, "planned_samples_per_s": plan.samples_per_s,
        "sustained_samples_per_s": round(sustained, 1), "of_plan": round(sustained / plan.samples_per_s, 3),
        "ledger_bears_samples_per_s": round(capacity), "load": {name: round(value, 4) for name, value in load.items()},
        "first_limit": first,
        "most_held_gib": round(most["held"] / SCALED_BYTES * TOKEN_BYTES / 2**30, 1),
        "budget_gib": round(run.sharing.budget_bytes / SCALED_BYTES * TOKEN_BYTES / 2**30, 1),
        "seconds": {name: round(value, 2) for name, value in told["spent"].items()},
    }  # fmt: skip


def server_database(server: PostgresServer, gpus: int) -> str:
    name = f"rehearsal{gpus}"
    server.make_database(name)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(SLOWER), choices=list(SLOWER))
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for gpus in options.gpus:
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = Path(temporary)
            server, urls = stack.enter_context(ledger_benchmark.databases(folder))
            generators = gpus // MACHINE
            leased = max(8, min(32, generators))
            work = folder / "capacity"
            capacity = ledger_benchmark.measure(urls["postgresql"][0], work, 8000, generators, leased)
            results[str(gpus)] = rehearse(gpus, folder, server, capacity)
            print(gpus, json.dumps(results[str(gpus)], indent=1), flush=True)
    conditions = {"commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model()}
    write_atomically(options.json, json.dumps({**conditions, "by_gpus": results}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
