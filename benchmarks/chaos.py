"""Injects faults into runs at random moments and checks that nothing is lost, counted twice, or left behind.

    python benchmarks/chaos.py [--seeds 0:300] [--json benchmarks/results/chaos.json]
    python benchmarks/chaos.py --plan 'arena: stop rank, lock ledger; mooncake: partition store'

Every seed is one run of the tiny target without Prefect. A driver (driver.py) owns the run as the flow does: it starts
the run's processes under their supervisors and keeps them running. A scenario (scenario.py) injects one to three of the
faults of faults/catalogue.py and heals them. Seeds take turns on five grounds: an arena, files and stored hidden
states, all with SQLite; Mooncake with PostgreSQL; and the same on two hosts (network namespaces; without root, on one).

In the end every sample must be consumed exactly once and none quarantined, the weights must be bit-identical to an
undisturbed run's, and no process, listening port, shared memory or lock may be left (verdict.py).

A line is added to the result's `.jsonl` file for each seed. Started again, it runs the seeds that are missing or were
not whole; where that file is gone, the committed result says which. Faults of space need file systems of their own
(`unshare`), clock jumps a C compiler; where they are missing, these faults are left out, and the result says so
(`never_struck`).
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from faults.base import Ground
from faults.catalogue import FAULTS
from faults.clock import Clock, make_clock
from faults.space import mounted, namespace_command
from scenario import RECIPE, SMALL, Outcome, Scenario, copy_run, start_driver
from two_hosts import TRAINER, Hosts, on, possible, two_hosts
from verdict import last_words, weights_hash

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.network.ports import HOST
from infra.processes.exit import PR_SET_PDEATHSIG, run_main
from infra.provenance import hardware
from infra.refusal import Refusal
from infra.settings import shared_memory_folder
from models.config.recipe import load_recipe

RESULT = Path(__file__).parent / "results" / "chaos.json"
DRIVER = Path(__file__).with_name("driver.py")
GROUNDS = ("arena", "mooncake", "files", "two hosts", "stored")
SAMPLES = 160
MEMORY_MIB, POSTGRES_MIB = 1024, 512
UNDISTURBED_S = 400.0


class Campaign:
    """Seeds one after the other, in one process with file systems, shared memory and servers of its own."""

    def __init__(self, stack: ExitStack, base: Path, samples: int, has_mounts: bool):
        self._stack, self._base, self._has_mounts = stack, base, has_mounts
        base.chmod(0o755)
        if has_mounts:
            memory = stack.enter_context(mounted(Path("/dev/shm"), MEMORY_MIB))
        else:
            folder = tempfile.TemporaryDirectory(prefix="tests-of-draftsmith-chaos-", dir=shared_memory_folder())
            memory = Path(stack.enter_context(folder))
        os.environ["DRAFTSMITH_SHM"] = str(memory)
        self._clock = make_clock(base)
        self._hosts = stack.enter_context(two_hosts()) if possible() else None
        self._prepared = prepare(base, samples)
        self._grounds: dict[str, Ground] = {}
        self._references: dict[int, str] = {}

    def run(self, seed: int, ground: str, plan: Sequence[str]) -> Outcome:
        """One seed; `plan` names its faults."""
        scenario = Scenario(seed, self._base, self._prepared, self._ground(ground), plan, seed // len(GROUNDS))
        return scenario.run(self._reference(scenario.outcome.ranks))

    def _ground(self, name: str) -> Ground:
        if name not in self._grounds:
            clock, mounts = self._clock, self._has_mounts
            if name in ("mooncake", "two hosts"):
                hosts = self._hosts if name == "two hosts" else None
                memory = self._base / name.replace(" ", "-")
                server = self._stack.enter_context(postgres(memory, clock, hosts, mounts))
                address = TRAINER if hosts else HOST
                overrides = (f"transport.address={address}", f"ledger.url={(memory / 'url').read_text()}")
                self._grounds[name] = Ground(name, "mooncake", overrides, server, hosts, mounts, clock)
            else:
                self._grounds[name] = Ground(name, name, (), None, None, mounts, clock)  # pyright: ignore[reportArgumentType]
        return self._grounds[name]

    def _reference(self, ranks: int) -> str:
        """Hash of the weights of an undisturbed run with `ranks` ranks."""
        if ranks not in self._references:
            folder = RunFolder(self._base / f"undisturbed-{ranks}")
            log = self._base / f"undisturbed-{ranks}.log"
            copy_run(self._prepared, folder, [f"training.ranks={ranks}"])
            if start_driver(folder, Ground("undisturbed", "arena"), log).wait(UNDISTURBED_S) != 0:
                raise RuntimeError(last_words(log))
            self._references[ranks] = weights_hash(folder)
        return self._references[ranks]


@contextmanager
def postgres(folder: Path, clock: Clock | None, hosts: Hosts | None, has_mounts: bool) -> Iterator[Path]:
    """A PostgreSQL in memory that whoever runs it starts again when it dies; its folder."""
    with ExitStack() as stack:
        folder.mkdir(mode=0o755)
        if has_mounts:
            stack.enter_context(mounted(folder, POSTGRES_MIB))
        command = [sys.executable, str(DRIVER), "--postgres", str(folder / "postgres"), TRAINER if hosts else HOST]
        environment = os.environ | (clock.environment if clock else {})
        keeper = subprocess.Popen(on(hosts and hosts.trainer, command), stdout=subprocess.PIPE, env=environment)
        stack.callback(keeper.wait, 60)
        stack.callback(keeper.kill)
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise RuntimeError(f"PostgreSQL did not start: {(folder / 'logs' / 'postgres.log').read_text()}")
        yield folder / "postgres"


def prepare(base: Path, samples: int) -> RunFolder:
    """A run folder, made by the run's own processes."""
    folder = RunFolder(base / "prepared")
    write_atomically(folder.config, load_recipe(RECIPE, [*SMALL, f"data.max_samples={samples}"]))
    for module in ("models.targets.prepare", "models.data.prepare"):
        subprocess.run([sys.executable, "-m", module, str(folder.path)], check=True, stdout=subprocess.DEVNULL)
    return folder


def run_share(jobs: list[tuple[int, str, list[str]]], part: Path, samples: int, has_mounts: bool) -> None:
    """Run (seed, ground, plan) one after the other, each with a line in `part`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as base, ExitStack() as stack:
        campaign = Campaign(stack, Path(base), samples, has_mounts)
        for seed, ground, plan in jobs:
            outcome = campaign.run(seed, ground, plan)
            with part.open("a") as file:
                file.write(json.dumps(vars(outcome)) + "\n")
            struck, ended = ", ".join(outcome.struck) or "nothing struck", "; ".join(outcome.faults) or "whole"
            print(f"seed {seed}, {ground}: {struck}; {outcome.wall_s:.0f} s: {ended}", flush=True)


def run_side_by_side(jobs: list[tuple[int, str, list[str]]], part: Path, samples: int, processes: int) -> None:
    """Share the jobs among processes, each in namespaces of its own."""
    namespaces = namespace_command()
    started = []
    try:
        for first in range(processes):
            share = json.dumps([jobs[first::processes], str(part), samples, bool(namespaces)])
            started.append(subprocess.Popen([*namespaces, sys.executable, __file__, "--share", share]))
        statuses = [process.wait() for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.terminate()
    if any(statuses):
        raise SystemExit(1)


OF_SEED = ("ground", "samples", "ranks", "generators", "checkpoint_steps", "lease_s")
"""Fields of an outcome that follow from its seed."""


def outcomes_in(part: Path) -> list[Outcome]:
    """All lines, oldest first; a seed that was not whole may be there again."""
    return [Outcome(**json.loads(line)) for line in part.read_text().splitlines()] if part.is_file() else []


def start_from_result(result: Path, part: Path) -> None:
    """Begin the lines with the outcomes of a campaign that was stopped, where only its result is left.

    Failures of seeds that ran again go first. Older results hold less of them: what follows from the seed is taken from
    its later outcome.
    """
    if not part.exists() and result.is_file():
        known = json.loads(result.read_text())
        drawn = {
            outcome["seed"]: {name: outcome[name] for name in OF_SEED if name in outcome}
            for outcome in known["outcomes"]
        }
        failed = [drawn[outcome["seed"]] | outcome for outcome in known.get("failed_before_a_later_commit", [])]
        outcomes = failed + known["outcomes"]
        part.write_text("".join(json.dumps(outcome) + "\n" for outcome in outcomes))


def jobs_of(plan: str) -> list[tuple[int, str, list[str]]]:
    """`GROUND: FAULT, FAULT; GROUND: ...` as jobs. Raises Refusal for names that are not known."""
    jobs = []
    for seed, text in enumerate(plan.split(";")):
        ground, _, names = text.partition(":")
        faults = [name.strip() for name in names.split(",") if name.strip()]
        unknown = {ground.strip()} - set(GROUNDS) | set(faults) - {fault.name for fault in FAULTS}
        if unknown:
            raise Refusal(f"--plan names {', '.join(sorted(unknown))}, which faults/catalogue.py does not know")
        jobs.append((seed, ground.strip(), faults))
    return jobs


def summary(outcomes: list[Outcome], wanted: str) -> dict[str, object]:
    """What the result file says."""
    latest = {outcome.seed: outcome for outcome in outcomes}
    runs = [latest[seed] for seed in sorted(latest)]
    struck = Counter(name.partition(" at ")[0] for outcome in runs for name in outcome.struck)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "seeds_wanted": wanted,
        "runs": len(runs),
        "failed": [outcome.seed for outcome in runs if outcome.faults],
        "failed_before_a_later_commit": [
            vars(outcome) for outcome in outcomes if outcome.faults and outcome is not latest[outcome.seed]
        ],
        "runs_by_commit": dict(Counter(outcome.commit for outcome in runs)),
        "grounds": dict(sorted(Counter(outcome.ground for outcome in runs).items())),
        "struck": dict(sorted(struck.items())),
        "never_struck": sorted({fault.name for fault in FAULTS} - set(struck)),
        "impossible_here": sorted({name for outcome in runs for name in outcome.impossible}),
        "fresh_owners": sum(outcome.resumed for outcome in runs),
        "stopped_with_a_sentence_and_resumed": sum(len(outcome.stopped) for outcome in runs),
        "outcomes": [vars(outcome) for outcome in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:300", help="FIRST:END")
    parser.add_argument("--plan", help="runs with these faults instead of seeds: 'GROUND: FAULT, FAULT; GROUND: ...'")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each run")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at the same time")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with everything undone, and what there is written down
    if options.share:
        jobs, part, samples, has_mounts = json.loads(options.share)
        run_share(jobs, Path(part), samples, has_mounts)
        return
    part = options.json.with_suffix(".jsonl")
    if options.plan:
        jobs = jobs_of(options.plan)
    else:
        start_from_result(options.json, part)
        first, end = map(int, options.seeds.split(":"))
        whole = {outcome.seed for outcome in outcomes_in(part) if not outcome.faults}
        jobs = [(seed, GROUNDS[seed % len(GROUNDS)], []) for seed in range(first, end) if seed not in whole]
    try:
        if jobs:
            run_side_by_side(jobs, part, options.samples, options.side_by_side)
    finally:
        result = summary(outcomes_in(part), options.plan or options.seeds)
        write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    print(f"{result['runs']} runs, failed: {result['failed'] or 'none'}: {options.json}")
    raise SystemExit(1 if result["failed"] else 0)


if __name__ == "__main__":
    run_main(main)
