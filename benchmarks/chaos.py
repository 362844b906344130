"""Kills processes of runs at random moments and checks that nothing is lost, counted twice, or left behind.

    python benchmarks/chaos.py [--seeds 0:200] [--json benchmarks/results/chaos.json]

Every seed is one run of the tiny target without Prefect: a driver owns the run as the flow does, starts generators and
trainer under their supervisors and keeps them running; this program kills generators, ranks, supervisors and the driver
itself (a new driver then resumes). In the end every sample must be consumed exactly once, the weights must be
bit-identical to an undisturbed run's, and no process, shared memory or lock may be left.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import psutil

from infra.bottleneck import StallWatch
from infra.data_plane import start_generator, start_trainer
from infra.exit import run_main
from infra.files import sha256_file, write_atomically
from infra.keep_running import follow
from infra.ledger.ledger import Ledger
from infra.locks import hold
from infra.ownership import own_run
from infra.pools.local import LocalPool
from infra.provenance import git_sha, hardware
from infra.records import Progress, TrainingResult
from infra.run_folder import RunFolder
from infra.settings import shared_memory_folder
from models.config import load_recipe, read_config

RESULT = Path(__file__).parent / "results" / "chaos.json"
RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.yaml"
SAMPLES = 160
SMALL = [f"data.max_samples={SAMPLES}", "data.max_tokens=64", "training.samples_per_step=4", "training.log_steps=1"]
RUN_S = 400.0
VICTIMS = ("generator", "rank", "generator and rank", "torchrun", "supervisor", "flow")
COMMANDS = {
    "generator": "models.capture.generator",
    "rank": "models.training.trainer",
    "torchrun": "models.training.launch",
}


@dataclass(frozen=True)
class Kill:
    """One planned SIGKILL."""

    victim: str
    progress: float
    """Share of the samples that are trained when it strikes."""
    delay_s: float


@dataclass
class Outcome:
    """One seed."""

    seed: int
    ranks: int
    generators: int
    checkpoint_steps: int
    kills: list[str] = field(default_factory=list)
    resumed: int = 0
    wall_s: float = 0.0
    faults: list[str] = field(default_factory=list)


def drive(path: Path) -> None:
    """Own the run and train it to its end, as the flow does."""
    folder = RunFolder(path)
    config = read_config(folder.config)
    with ExitStack() as stack:
        pool = LocalPool(stack.enter_context(own_run(folder, config.transport, print)))
        settings, training = config.generator, config.training
        generators = [
            stack.enter_context(closing(start_generator(pool, folder, index, settings.count, settings.threads)))
            for index in range(settings.count)
        ]
        trainer = stack.enter_context(closing(start_trainer(pool, folder, training.ranks, training.threads)))
        ledger = stack.enter_context(Ledger.open(folder.ledger_url, folder.name))
        follow(trainer, generators, print, print, [StallWatch(ledger, 120.0).check])


def prepare(base: Path, name: str, overrides: list[str]) -> RunFolder:
    """A run folder, made by the run's own processes."""
    folder = RunFolder(base / name)
    write_atomically(folder.config, load_recipe(RECIPE, [*SMALL, *overrides]))
    for module in ("models.targets.prepare", "models.data.prepare"):
        subprocess.run([sys.executable, "-m", module, str(folder.path)], check=True, stdout=subprocess.DEVNULL)
    return folder


def copy_run(prepared: RunFolder, base: Path, name: str, overrides: list[str]) -> RunFolder:
    """Another run on the same target and samples."""
    folder = RunFolder(base / name)
    write_atomically(folder.config, load_recipe(RECIPE, [*SMALL, *overrides]))
    shutil.copy(prepared.target, folder.target)
    shutil.copy(prepared.samples, folder.samples)
    return folder


def start_driver(folder: RunFolder) -> "subprocess.Popen[bytes]":
    command = [sys.executable, __file__, "--drive", str(folder.path)]
    with (folder.path / "driver.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """Everything on this machine that names the run in its command line, but for its drivers."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder.path) in process.cmdline() and "--drive" not in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def pick(folder: RunFolder, victim: str, dice: random.Random) -> list[psutil.Process]:
    """The processes to kill; empty while none is there."""
    chosen: list[psutil.Process] = []
    supervisors = [p for p in processes_of(folder) if any(part.endswith("supervisor.py") for part in p.cmdline())]
    for kind in victim.split(" and "):
        if kind == "supervisor":
            candidates = supervisors
        else:
            candidates = [p for p in processes_of(folder) if p not in supervisors and COMMANDS[kind] in p.cmdline()]
        if not candidates:
            return []
        chosen.append(dice.choice(sorted(candidates, key=lambda process: process.pid)))
    return chosen


class Scenario:
    """One seed: a run, and who is killed when."""

    def __init__(self, seed: int, base: Path, prepared: RunFolder):
        self.dice = random.Random(seed)
        ranks, generators = self.dice.choice((1, 1, 2)), self.dice.choice((1, 2))
        self.outcome = Outcome(seed, ranks, generators, self.dice.randint(2, 12))
        overrides = [
            f"training.ranks={ranks}",
            f"generator.count={generators}",
            f"training.checkpoint_steps={self.outcome.checkpoint_steps}",
        ]
        self.folder = copy_run(prepared, base, f"seed-{seed}", overrides)
        count = self.dice.choice((1, 1, 2, 3))
        planned = [
            Kill(VICTIMS[(seed + index) % len(VICTIMS)], self.dice.uniform(-0.2, 0.95), self.dice.uniform(0, 0.4))
            for index in range(count)
        ]
        self.kills = sorted(planned, key=lambda kill: kill.progress)
        self.driver: subprocess.Popen[bytes] | None = None

    def run(self, reference: str) -> Outcome:
        """Run to the end under fire, and judge."""
        started = time.monotonic()
        self.driver = start_driver(self.folder)
        try:
            for kill in self.kills:
                self._strike(kill)
            self._wait_for_end(started + RUN_S)
            self.outcome.faults += faults(self.folder, reference)
        except TimeoutError as error:
            self.outcome.faults.append(str(error))
            self.driver.kill()
        self.outcome.wall_s = round(time.monotonic() - started, 1)
        return self.outcome

    def _trained(self) -> float:
        """Share of samples trained; negative while the run starts."""
        if not (self.folder.path / "ledger.sqlite").exists():
            return -1.0
        with Ledger.open(self.folder.ledger_url, self.folder.name) as ledger:
            states = ledger.progress()
        return (states.taken + states.consumed) / states.total if states.total else -0.1

    def _strike(self, kill: Kill) -> None:
        deadline = time.monotonic() + RUN_S / 2
        moment = f"{kill.victim} at {max(kill.progress, 0):.0%}"
        if kill.progress < 0:
            time.sleep(kill.delay_s * 15)
        else:
            while self._trained() < kill.progress:
                self._keep_driving()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{moment}: never came so far")
                time.sleep(0.02)
            time.sleep(kill.delay_s)
        assert self.driver is not None
        if kill.victim == "flow":
            self.driver.send_signal(signal.SIGKILL)
            self.driver.wait(30)
            self.outcome.kills.append(moment)
            return
        while not (victims := pick(self.folder, kill.victim, self.dice)):
            if self.driver.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.02)
        for process in victims:
            if process.is_running():
                process.kill()
        self.outcome.kills.append(moment)

    def _keep_driving(self) -> None:
        """A driver that was killed is followed by a fresh one."""
        assert self.driver is not None
        status = self.driver.poll()
        if status is None or status == 0:
            return
        if status != -signal.SIGKILL:
            tail = (self.folder.path / "driver.log").read_text()[-1500:]
            raise TimeoutError(f"the driver ended with {status}: {tail}")
        self.outcome.resumed += 1
        self.driver = start_driver(self.folder)

    def _wait_for_end(self, deadline: float) -> None:
        assert self.driver is not None
        while self.driver.poll() != 0:
            self._keep_driving()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished after {RUN_S:.0f} s")
            time.sleep(0.1)


def faults(folder: RunFolder, reference: str) -> list[str]:
    """What is wrong with a run that has ended; empty when nothing is."""
    found = []
    with Ledger.open(folder.ledger_url, folder.name) as ledger:
        states = ledger.progress()
    if states != Progress(consumed=SAMPLES):
        found.append(f"ledger: {states}")
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    if steps != list(range(1, SAMPLES // 4 + 1)):
        found.append(f"steps: {steps}")
    if weights_hash(folder) != reference:
        found.append("final weights differ from an undisturbed run's")
    found += [f"process left: {' '.join(process.cmdline())}" for process in processes_of(folder)]
    found += [f"shared memory left: {path}" for path in shared_memory_folder().iterdir()]
    for lock in (folder.run_lock, folder.path / "processes.lock"):
        with hold(lock):
            pass
    return found


def weights_hash(folder: RunFolder) -> str:
    checkpoint = folder.path / TrainingResult.read(folder.training).checkpoint
    return sha256_file(checkpoint / "draft.safetensors") + sha256_file(checkpoint / "averaged.safetensors")


def reference_of(base: Path, prepared: RunFolder, ranks: int) -> str:
    """Hash of the weights that an undisturbed run of so many ranks comes to."""
    folder = copy_run(prepared, base, f"undisturbed-{ranks}", [f"training.ranks={ranks}"])
    if start_driver(folder).wait(RUN_S) != 0:
        raise RuntimeError((folder.path / "driver.log").read_text()[-3000:])
    return weights_hash(folder)


def campaigns(seeds: range, side_by_side: int) -> list[Outcome]:
    """All seeds, in so many processes, each with shared memory of its own."""
    shares = [seeds[first::side_by_side] for first in range(side_by_side)]
    with ProcessPoolExecutor(side_by_side, mp_context=get_context("spawn")) as processes:
        return sorted(chain.from_iterable(processes.map(campaign, shares)), key=lambda outcome: outcome.seed)


def campaign(seeds: range) -> list[Outcome]:
    """Seeds one after the other."""
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as scratch,
        tempfile.TemporaryDirectory(prefix="tests-of-draftsmith-chaos-", dir=shared_memory_folder()) as memory,
    ):
        os.environ["DRAFTSMITH_SHM"] = memory
        base = Path(scratch)
        prepared = prepare(base, "prepared", [])
        references: dict[int, str] = {}
        for seed in seeds:
            scenario = Scenario(seed, base, prepared)
            ranks = scenario.outcome.ranks
            if ranks not in references:
                references[ranks] = reference_of(base, prepared, ranks)
            outcome = scenario.run(references[ranks])
            outcomes.append(outcome)
            verdict = "; ".join(outcome.faults) or "whole"
            print(f"seed {seed}: {', '.join(outcome.kills)}; {outcome.wall_s:.0f} s: {verdict}", flush=True)
            if not outcome.faults:
                shutil.rmtree(scenario.folder.path)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at the same time")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive)
        return
    first, end = map(int, options.seeds.split(":"))
    outcomes = campaigns(range(first, end), options.side_by_side)
    failed = [outcome.seed for outcome in outcomes if outcome.faults]
    kills = Counter(kill.rpartition(" at ")[0] for outcome in outcomes for kill in outcome.kills)
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "seeds": options.seeds,
        "runs": len(outcomes),
        "failed": failed,
        "kills": dict(sorted(kills.items())),
        "resumed_by_a_fresh_flow": sum(outcome.resumed for outcome in outcomes),
        "outcomes": [vars(outcome) for outcome in outcomes],
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    print(f"{len(outcomes)} runs, {sum(kills.values())} kills, {len(failed)} failed {failed or ''}: {options.json}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_main(main)
