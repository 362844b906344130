"""Kills processes of runs at random moments and checks that nothing is lost, counted twice, or left behind.

    python benchmarks/chaos.py [--seeds 0:200] [--json benchmarks/results/chaos.json]

Every seed is one run of the tiny target without Prefect: a driver (driver.py) owns the run as the flow does, starts its
processes under their supervisors and keeps them running; a scenario (scenario.py) kills generators, ranks, supervisors,
Mooncake's master and store, PostgreSQL and the driver itself (a new driver then resumes), and takes a network interface
away. A third of the runs has an arena and SQLite, a third Mooncake and PostgreSQL, a third the same on two hosts
(network namespaces; without root, on one). In the end every sample must be consumed exactly once, the weights must be
bit-identical to an undisturbed run's, and no process, shared memory or lock may be left. Stopped, it goes on with the
seeds that are missing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from scenario import (
    DRIVER,
    MOONCAKE,
    OURS,
    RECIPE,
    RUN_S,
    SMALL,
    Ground,
    Outcome,
    Scenario,
    copy_run,
    log_of,
    start_driver,
    weights_hash,
)
from two_hosts import TRAINER, Hosts, on, possible, two_hosts

from infra.exit import run_main
from infra.files import write_atomically
from infra.ports import HOST
from infra.provenance import hardware
from infra.run_folder import RunFolder
from infra.settings import shared_memory_folder
from models.config import load_recipe

RESULT = Path(__file__).parent / "results" / "chaos.json"


def campaigns(seeds: range, side_by_side: int, part: Path) -> list[Outcome]:
    """All seeds, in so many processes, each with shared memory of its own; those in the file `part` are done."""
    missing = sorted(set(seeds) - {outcome.seed for outcome in done(part)})
    shares = [missing[first::side_by_side] for first in range(side_by_side)]
    with ProcessPoolExecutor(side_by_side, mp_context=get_context("spawn")) as processes:
        list(processes.map(campaign, shares, repeat(part)))
    return sorted((outcome for outcome in done(part) if outcome.seed in seeds), key=lambda outcome: outcome.seed)


def done(part: Path) -> list[Outcome]:
    """What an earlier start came to."""
    return [Outcome(**json.loads(line)) for line in part.read_text().splitlines()] if part.is_file() else []


def campaign(seeds: list[int], part: Path) -> None:
    """Seeds one after the other, each with a line in the file `part`."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        everywhere = stack.enter_context(grounds())
        memory = tempfile.TemporaryDirectory(prefix="tests-of-draftsmith-chaos-", dir=shared_memory_folder())
        os.environ["DRAFTSMITH_SHM"] = stack.enter_context(memory)
        prepared = prepare(base)
        references: dict[int, str] = {}
        for seed in seeds:
            turn, place = divmod(seed, len(everywhere))
            scenario = Scenario(seed, base, prepared, everywhere[place], turn)
            ranks = scenario.outcome.ranks
            if ranks not in references:
                references[ranks] = reference_of(base, prepared, ranks)
            outcome = scenario.run(references[ranks])
            with part.open("a") as file:
                file.write(json.dumps(vars(outcome)) + "\n")
            verdict = "; ".join(outcome.faults) or "whole"
            kills = ", ".join(outcome.kills)
            print(f"seed {seed}, {outcome.ground}: {kills}; {outcome.wall_s:.0f} s: {verdict}", flush=True)
            if not outcome.faults:
                shutil.rmtree(scenario.folder.path)


@contextmanager
def grounds() -> Iterator[tuple[Ground, ...]]:
    """One with SQLite and an arena, one with PostgreSQL and Mooncake, and the same on two hosts."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()) if possible() else None
        far = "two hosts" if hosts else "mooncake again"
        yield (
            Ground("arena", OURS),
            stack.enter_context(mooncake_ground("mooncake", HOST, None)),
            stack.enter_context(mooncake_ground(far, TRAINER if hosts else HOST, hosts)),
        )


@contextmanager
def mooncake_ground(name: str, address: str, hosts: Hosts | None) -> Iterator[Ground]:
    """With a PostgreSQL that whoever runs it starts again when it dies."""
    with ExitStack() as stack:
        memory = tempfile.TemporaryDirectory(prefix="tests-of-draftsmith-chaos-", dir=shared_memory_folder())
        public = Path(stack.enter_context(memory))
        public.chmod(0o755)
        command = [sys.executable, str(DRIVER), "--postgres", str(public / "postgres"), address]
        keeper = subprocess.Popen(on(hosts and hosts.trainer, command), stdout=subprocess.PIPE)
        stack.callback(keeper.wait, 60)
        stack.callback(keeper.kill)
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise RuntimeError(f"PostgreSQL did not start: {(public / 'logs' / 'postgres.log').read_text()}")
        url = (public / "url").read_text()
        overrides = ("transport.kind=mooncake", f"transport.address={address}", f"ledger.url={url}")
        victims = ("interface", *MOONCAKE) if hosts else MOONCAKE
        yield Ground(name, victims, overrides, public / "postgres", hosts)


def prepare(base: Path) -> RunFolder:
    """A run folder, made by the run's own processes."""
    folder = RunFolder(base / "prepared")
    write_atomically(folder.config, load_recipe(RECIPE, SMALL))
    for module in ("models.targets.prepare", "models.data.prepare"):
        subprocess.run([sys.executable, "-m", module, str(folder.path)], check=True, stdout=subprocess.DEVNULL)
    return folder


def reference_of(base: Path, prepared: RunFolder, ranks: int) -> str:
    """Hash of the weights that an undisturbed run of so many ranks comes to."""
    folder = copy_run(prepared, base, f"undisturbed-{ranks}", [f"training.ranks={ranks}"])
    if start_driver(folder).wait(RUN_S) != 0:
        raise RuntimeError(log_of(folder, "both").read_text()[-3000:])
    return weights_hash(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at the same time")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    part = options.json.with_suffix(".part.jsonl")
    outcomes = campaigns(range(first, end), options.side_by_side, part)
    failed = [outcome.seed for outcome in outcomes if outcome.faults]
    kills = Counter(kill.rpartition(" at ")[0] for outcome in outcomes for kill in outcome.kills)
    result = {
        "runs_by_commit": dict(Counter(outcome.commit for outcome in outcomes)),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "seeds": options.seeds,
        "runs": len(outcomes),
        "failed": failed,
        "grounds": dict(sorted(Counter(outcome.ground for outcome in outcomes).items())),
        "kills": dict(sorted(kills.items())),
        "resumed_by_a_fresh_flow": sum(outcome.resumed for outcome in outcomes),
        "outcomes": [vars(outcome) for outcome in outcomes],
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    part.unlink()
    print(f"{len(outcomes)} runs, {sum(kills.values())} kills, {len(failed)} failed {failed or ''}: {options.json}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_main(main)
