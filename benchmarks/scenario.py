"""One run with injected faults: which, when, and whether it came out whole."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from faults.base import Fault, Ground, Missed
from faults.catalogue import faults_on
from faults.space import mounted
from two_hosts import on
from verdict import MARK, kind_of, last_words, processes_of, trained_steps, verdict

from infra.files.atomic import write_atomically
from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from infra.provenance import git_sha
from infra.settings import shared_memory_folder
from models.config.recipe import load_recipe

DRIVER = Path(__file__).with_name("driver.py")
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
SAMPLES, SAMPLES_PER_STEP = 160, 4
SMALL = [
    "data.max_tokens=64",
    f"training.samples_per_step={SAMPLES_PER_STEP}",
    "training.log_steps=1",
    "training.heldout_steps=8",
    "training.heldout_prompts=2",
]
KEPT = Path("/tmp/draftsmith-chaos")
"""Where this folder exists, the run folders of runs that are not whole are copied to it."""
RUN_S = 600.0
GONE_S = 60.0
"""For the last processes of a killed owner."""
POLL_S = 0.05
READY = "ready\n"
RUN_FOLDER_MIB, OBJECTS_MIB = 512, 160
STARTING_S = 6.0
"""Faults that strike while a run starts do so within this time."""


@dataclass
class Outcome:
    """One seed."""

    seed: int
    commit: str
    ground: str
    samples: int
    ranks: int
    generators: int
    checkpoint_steps: int
    lease_s: float
    struck: list[str] = field(default_factory=list)
    """Faults and details, in order; `NAME at PERCENT: DETAIL`."""
    missed: list[str] = field(default_factory=list)
    """Faults that found nothing to strike, mostly because the run had ended."""
    impossible: list[str] = field(default_factory=list)
    """Planned faults that cannot strike on this ground or machine."""
    resumed: int = 0
    """Fresh owners."""
    stopped: list[str] = field(default_factory=list)
    """Sentences with which the run stopped, as it may; it was healed and resumed."""
    wall_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    """What was wrong in the end; empty for a run that is whole."""


@dataclass(frozen=True)
class Planned:
    """A fault of this run."""

    fault: Fault
    progress: float
    """Share of the samples that are trained when it strikes; negative: while the run starts."""


class BrokenError(Exception):
    """The run did not come through; the message says how."""


def copy_run(prepared: RunFolder, folder: RunFolder, overrides: list[str]) -> RunFolder:
    """Another run on the same target and samples."""
    samples = json.loads(prepared.config.read_text())["data"]["max_samples"]
    config = load_recipe(RECIPE, [*SMALL, f"data.max_samples={samples}", *overrides])
    write_atomically(folder.config, config)
    shutil.copy(prepared.target, folder.target)
    shutil.copy(prepared.samples, folder.samples)
    return folder


def start_driver(folder: RunFolder, ground: Ground, log: Path, side: str = "both", resumes: bool = False):
    """Start an owner of the run, or of one host's part of it."""
    hosts = ground.hosts
    host = None if hosts is None else hosts.generator if side == "generator" else hosts.trainer
    options = ["--side", side, *(["--resumes"] if resumes and side != "generator" else [])]
    environment = {MARK: str(folder.path)} | (ground.clock.environment if ground.clock else {})
    with log.open("ab") as output:
        return subprocess.Popen(
            on(host, [sys.executable, str(DRIVER), str(folder.path), *options]),
            stdout=output, stderr=output, start_new_session=True, env=os.environ | environment,
        )  # fmt: skip


class Scenario:
    """One seed: a run, and what strikes it when."""

    def __init__(self, seed: int, base: Path, prepared: RunFolder, ground: Ground, plan: Sequence[str], turn: int):
        """Names of the faults, each of which lasts as short as it may; or none: then faults are drawn, the first of
        them in turn."""
        self.dice, self.ground, self.base, self.brief = random.Random(seed), ground, base, bool(plan)
        self.samples = json.loads(prepared.config.read_text())["data"]["max_samples"]
        ranks, generators = self.dice.choice((1, 1, 2)), self.dice.choice((1, 2))
        self.outcome = Outcome(
            seed=seed,
            commit=git_sha(),
            ground=ground.name,
            samples=self.samples,
            ranks=ranks,
            generators=generators,
            checkpoint_steps=self.dice.randint(2, 12),
            lease_s=self.dice.choice((4.0, 120.0)),
        )
        self.plan = sorted(self._draw(turn) if not plan else self._named(plan), key=lambda planned: planned.progress)
        self.folder = RunFolder(base / f"seed-{seed}")
        self.objects, self.memory = base / f"objects-{seed}", shared_memory_folder()
        self.prepared = prepared
        self.drivers: dict[str, subprocess.Popen[bytes]] = {}
        self.has_stopped = False
        self._excuses: list[str] = []
        self._detail: list[str] = []

    def _draw(self, turn: int) -> list[Planned]:
        known = faults_on(self.ground)
        drawn = [known[turn % len(known)], *self.dice.choices(known, k=self.dice.choice((0, 1, 1, 2)))]
        unique = list(dict.fromkeys(drawn))
        return [Planned(fault, self.dice.uniform(-0.2, 0.95)) for fault in unique]

    def _named(self, names: Sequence[str]) -> list[Planned]:
        known = {fault.name: fault for fault in faults_on(self.ground)}
        self.outcome.impossible = [name for name in names if name not in known]
        possible = [known[name] for name in names if name in known]
        return [Planned(fault, 0.05 + 0.6 * index / len(possible)) for index, fault in enumerate(possible)]

    def run(self, reference: str) -> Outcome:
        """Run to the end under fire, and judge."""
        started = time.monotonic()
        self._deadline = started + RUN_S
        with ExitStack() as stack:
            if self.ground.mounts:
                stack.enter_context(mounted(self.folder.path, RUN_FOLDER_MIB))
                stack.enter_context(mounted(self.objects, OBJECTS_MIB))
            copy_run(self.prepared, self.folder, self._overrides())
            stack.callback(self._kill_drivers)
            try:
                with ExitStack() as rest:
                    self._strike_all(rest)
                    self._finish()
                self.outcome.faults += verdict(self, reference)
            except BrokenError as error:
                self.outcome.faults.append(str(error))
            self._kill_drivers()
            if self.outcome.faults and KEPT.is_dir():
                self._keep()
            if self.ground.clock:
                self.ground.clock.move(0)
        shutil.rmtree(self.folder.path, ignore_errors=True)
        shutil.rmtree(self.objects, ignore_errors=True)
        self.outcome.wall_s = round(time.monotonic() - started, 1)
        return self.outcome

    def _overrides(self) -> list[str]:
        outcome = self.outcome
        return [
            f"training.ranks={outcome.ranks}",
            f"generator.count={outcome.generators}",
            f"training.checkpoint_steps={outcome.checkpoint_steps}",
            f"ledger.lease_seconds={outcome.lease_s}",
            f"transport.kind={self.ground.transport}",
            *([f"transport.folder={self.objects}"] if self.ground.transport in ("files", "stored") else []),
            *self.ground.overrides,
            *(override for planned in self.plan for override in planned.fault.overrides),
        ]

    def _strike_all(self, rest: ExitStack) -> None:
        for planned in self.plan:
            if planned.fault.phase == "before":
                rest.enter_context(planned.fault.strike(self))
                self.outcome.struck.append(planned.fault.name)
        self.resume(first=True)
        for planned in self.plan:
            if planned.fault.phase != "before":
                self._strike(planned, rest)

    def _strike(self, planned: Planned, rest: ExitStack) -> None:
        fault = planned.fault
        if planned.progress < 0:
            self._sleep(self.dice.uniform(0, STARTING_S))
        else:
            self._wait(lambda: not self._is_going() or (self.trained() >= planned.progress and fault.has_target(self)))
        self._detail, moment = [], f"{fault.name} at {self.trained():.0%}"
        try:
            if not self._is_going():
                raise Missed
            if fault.stops:
                self._excuses.append(fault.stops)
            if fault.phase == "rest":
                rest.enter_context(fault.strike(self))
            elif fault.phase == "dead":
                self._strike_dead(fault)
            else:
                with fault.strike(self):
                    self._sleep(fault.lasts_s[0] if self.brief else self.dice.uniform(*fault.lasts_s))
        except Missed:
            self.outcome.missed.append(moment)
            return
        self.outcome.struck.append(": ".join([moment, *self._detail]))
        self._wait(lambda: True)
        if self.has_stopped:
            self.resume()

    def _finish(self) -> None:
        """Wait for the run's end. Where it stops with a fault's sentence, a person resumes it, once per fault."""
        while True:
            self._wait(lambda: not self._is_going())
            if not self.has_stopped:
                return
            self._excuses.pop()
            self.resume()

    def _strike_dead(self, fault: Fault) -> None:
        """Strike between two owners. Where the new one refuses, as it may, the fault is healed and it is resumed."""
        self.kill_flow()
        try:
            with fault.strike(self):
                self.resume()
                if fault.stops:
                    self._wait(lambda: self.has_stopped or not self._is_going() or self.has_moved())
        except Missed:
            self.resume()
            raise

    def note(self, detail: str) -> None:
        self._detail.append(detail)

    def trained(self) -> float:
        """Share of the steps that are trained."""
        return max(trained_steps(self.folder), default=0) / self.total_steps

    @property
    def total_steps(self) -> int:
        return self.samples // SAMPLES_PER_STEP

    def has_moved(self) -> bool:
        """Whether the present owner has begun to start processes."""
        return READY in self._log("trainer" if self.ground.hosts else "both").read_text().rpartition("\x00")[2]

    def _log(self, side: str) -> Path:
        return self.base / f"{self.folder.name}-driver-{side}.log"

    def resume(self, first: bool = False) -> None:
        """Start whoever owns the run; it resumes what is there."""
        self.has_stopped, self.drivers = False, {}
        self.outcome.resumed += not first
        sides = ("both",) if self.ground.hosts is None else ("trainer", "generator")
        for side in sides:
            with self._log(side).open("ab") as log:
                log.write(b"\x00")  # a mark: the log of a fresh owner begins here
            self.drivers[side] = start_driver(self.folder, self.ground, self._log(side), side, resumes=not first)
            if side == "trainer":
                self._wait(lambda: self.has_stopped or self.has_moved())
                if self.has_stopped:
                    return

    def kill_flow(self) -> None:
        """The owner of the run dies on all hosts, and all that it started ends."""
        if not self._is_going():
            raise Missed
        self._kill_drivers()
        if self.drivers and all(driver.returncode == 0 for driver in self.drivers.values()):
            raise Missed
        with hold(self.folder.path / "processes.lock", wait_s=GONE_S):
            pass

    def _kill_drivers(self) -> None:
        for driver in self.drivers.values():
            driver.kill()
            driver.wait(30)

    def pick(self, kind: str) -> list[psutil.Process]:
        chosen: list[psutil.Process] = []

        def there() -> bool:
            chosen[:] = self._pick(kind)
            return bool(chosen) or not self._is_going()

        self._wait(there)
        if not chosen:
            raise Missed
        return chosen

    def _pick(self, kinds: str) -> list[psutil.Process]:
        """One of each kind; empty while one of them is not there."""
        chosen: list[psutil.Process] = []
        for kind in kinds.split(" and "):
            if kind == "flow":
                chosen += [psutil.Process(driver.pid) for driver in self.drivers.values() if driver.poll() is None]
                continue
            there = [process for process in processes_of(self.folder) if kind_of(process) == kind]
            if not there:
                return []
            chosen.append(self.dice.choice(sorted(there, key=lambda process: process.pid)))
        return chosen

    def _is_going(self) -> bool:
        return any(driver.poll() is None for driver in self.drivers.values())

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() >= end or not self._is_going())

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait, seeing to owners that ended badly. Raises BrokenError."""
        while not until():
            self._check_drivers()
            if time.monotonic() > self._deadline:
                raise BrokenError(f"not finished after {RUN_S:.0f} s: {self._last_words()}")
            time.sleep(POLL_S)
        self._check_drivers()

    def _check_drivers(self) -> None:
        """A run that stopped as it may is noted, and is resumed once its fault is healed. Raises BrokenError."""
        ended = [driver.returncode for driver in self.drivers.values() if driver.poll()]
        if not ended or self.has_stopped:
            return
        words = self._last_words()
        if not any(re.search(excuse, words) for excuse in self._excuses):
            raise BrokenError(f"the run's owner ended with {ended[0]}: {words}")
        self.has_stopped = True
        self.outcome.stopped.append(words.strip().splitlines()[-1][-500:])
        self._kill_drivers()

    def _keep(self) -> None:
        kept = KEPT / self.folder.name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.folder.path, kept, ignore=shutil.ignore_patterns("*.pt", "*.safetensors"))
        for log in self.base.glob(f"{self.folder.name}-driver-*.log"):
            shutil.copy(log, kept)

    def _last_words(self) -> str:
        return "".join(last_words(self._log(side)) for side in self.drivers)
