"""One run under fire: its ground, who is killed when, and whether it came out whole. Used by chaos.py."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from two_hosts import Hosts, on

from infra.files import sha256_file, write_atomically
from infra.locks import hold
from infra.provenance import git_sha
from infra.records import Progress, TrainingResult
from infra.run_folder import RunFolder
from infra.settings import shared_memory_folder
from models.config import load_recipe

DRIVER = Path(__file__).with_name("driver.py")
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
SAMPLES, SAMPLES_PER_STEP = 160, 4
SMALL = [
    f"data.max_samples={SAMPLES}",
    "data.max_tokens=64",
    f"training.samples_per_step={SAMPLES_PER_STEP}",
    "training.log_steps=1",
]
RUN_S = 400.0
READY = "ready\n"
OURS = ("generator", "rank", "generator and rank", "torchrun", "supervisor", "flow")
MOONCAKE = ("master", "store", "postgres", *OURS)
MARKS = {
    "generator": "models.capture.generator",
    "rank": "models.training.trainer",
    "torchrun": "models.training.launch",
    "store": "infra.mooncake.store",
    "master": "mooncake_master",
    "supervisor": "supervisor.py",
}


@dataclass(frozen=True)
class Ground:
    """Where a run takes place, and who may be killed there."""

    name: str
    victims: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    postgres: Path | None = None
    """Folder of its PostgreSQL."""
    hosts: Hosts | None = None


@dataclass(frozen=True)
class Kill:
    """One planned SIGKILL."""

    victim: str
    progress: float
    """Share of the samples that are trained when it strikes; negative: while the run starts."""
    delay_s: float


@dataclass
class Outcome:
    """One seed."""

    seed: int
    commit: str
    ground: str
    ranks: int
    generators: int
    checkpoint_steps: int
    kills: list[str] = field(default_factory=list)
    resumed: int = 0
    wall_s: float = 0.0
    faults: list[str] = field(default_factory=list)


def copy_run(prepared: RunFolder, base: Path, name: str, overrides: list[str]) -> RunFolder:
    """Another run on the same target and samples."""
    folder = RunFolder(base / name)
    write_atomically(folder.config, load_recipe(RECIPE, [*SMALL, *overrides]))
    shutil.copy(prepared.target, folder.target)
    shutil.copy(prepared.samples, folder.samples)
    return folder


def start_driver(folder: RunFolder, host: str | None = None, side: str = "both") -> "subprocess.Popen[bytes]":
    command = on(host, [sys.executable, str(DRIVER), str(folder.path), "--side", side])
    with log_of(folder, side).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def log_of(folder: RunFolder, side: str) -> Path:
    return folder.path / f"driver-{side}.log"


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """Everything on this machine that writes to the run's logs, but for its drivers."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{folder.path}/") and not is_a(
                process, "driver.py"
            ):
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def is_a(process: psutil.Process, mark: str) -> bool:
    return any(part.endswith(mark) for part in process.cmdline()[:6])


class Scenario:
    """One seed: a run, and who is killed when."""

    def __init__(self, seed: int, base: Path, prepared: RunFolder, ground: Ground, turn: int):
        """`turn`: how many runs there were on this ground before; every victim has its turn."""
        self.dice, self.ground = random.Random(seed), ground
        ranks, generators = self.dice.choice((1, 1, 2)), self.dice.choice((1, 2))
        self.outcome = Outcome(seed, git_sha(), ground.name, ranks, generators, self.dice.randint(2, 12))
        overrides = [
            f"training.ranks={ranks}",
            f"generator.count={generators}",
            f"training.checkpoint_steps={self.outcome.checkpoint_steps}",
            *ground.overrides,
        ]
        self.folder = copy_run(prepared, base, f"seed-{seed}", overrides)
        planned = [
            Kill(
                ground.victims[(turn + index) % len(ground.victims)],
                self.dice.uniform(-0.2, 0.95),
                self.dice.uniform(0, 0.4),
            )
            for index in range(self.dice.choice((1, 1, 2, 3)))
        ]
        self.kills = sorted(planned, key=lambda kill: kill.progress)
        self.drivers: list[subprocess.Popen[bytes]] = []

    def run(self, reference: str) -> Outcome:
        """Run to the end under fire, and judge."""
        started = time.monotonic()
        try:
            self._start_drivers()
            for kill in self.kills:
                self._strike(kill)
            self._wait_for_end(started + RUN_S)
            self.outcome.faults += self._faults(reference)
        except TimeoutError as error:
            self.outcome.faults.append(str(error))
        finally:
            for driver in self.drivers:
                driver.kill()
                driver.wait(30)
        self.outcome.wall_s = round(time.monotonic() - started, 1)
        return self.outcome

    def _start_drivers(self) -> None:
        hosts = self.ground.hosts
        if hosts is None:
            self.drivers = [start_driver(self.folder)]
            return
        self.drivers = [start_driver(self.folder, hosts.trainer, "trainer")]
        deadline = time.monotonic() + RUN_S / 2
        while READY not in log_of(self.folder, "trainer").read_text():
            self._check_drivers()
            if time.monotonic() > deadline:
                raise TimeoutError("the trainer's host was never ready")
            time.sleep(0.05)
        self.drivers.append(start_driver(self.folder, hosts.generator, "generator"))

    def _check_drivers(self) -> None:
        for driver in self.drivers:
            if driver.poll():
                logs = [log_of(self.folder, side) for side in ("both", "trainer", "generator")]
                tails = "".join(log.read_text()[-1500:] for log in logs if log.exists())
                raise TimeoutError(f"a driver ended with {driver.returncode}: {tails}")

    def _trained(self) -> float:
        metrics = self.folder.metrics
        steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        return steps * SAMPLES_PER_STEP / SAMPLES

    def _strike(self, kill: Kill) -> None:
        deadline = time.monotonic() + RUN_S / 2
        moment = f"{kill.victim} at {max(kill.progress, 0):.0%}"
        if kill.progress < 0:
            time.sleep(kill.delay_s * 15)
        else:
            while self._trained() < kill.progress:
                self._check_drivers()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{moment}: never came so far")
                time.sleep(0.02)
            time.sleep(kill.delay_s)
        if self._hit(kill.victim, deadline):
            self.outcome.kills.append(moment)

    def _hit(self, victim: str, deadline: float) -> bool:
        """Kill; False where the run ended before there was anybody to kill."""
        if victim == "flow":
            return self._kill_the_flow()
        if victim == "interface":
            assert self.ground.hosts is not None
            self.ground.hosts.lose_interface(self.dice.uniform(1, 6))
            return True
        if victim == "postgres":
            assert self.ground.postgres is not None
            os.kill(int((self.ground.postgres / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            return True
        while not (victims := self._pick(victim)):
            if self.drivers[0].poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        for process in victims:
            if process.is_running():
                process.kill()
        return True

    def _kill_the_flow(self) -> bool:
        """Whoever owns the run dies, on all hosts; a fresh one resumes."""
        for driver in self.drivers:
            driver.send_signal(signal.SIGKILL)
            driver.wait(30)
        if self.drivers[0].returncode == 0:
            return False
        self.outcome.resumed += 1
        self._start_drivers()
        return True

    def _pick(self, victim: str) -> list[psutil.Process]:
        """The processes to kill; empty while one of them is not there."""
        chosen: list[psutil.Process] = []
        for kind in victim.split(" and "):
            candidates = [process for process in processes_of(self.folder) if self._is(process, kind)]
            if not candidates:
                return []
            chosen.append(self.dice.choice(sorted(candidates, key=lambda process: process.pid)))
        return chosen

    def _is(self, process: psutil.Process, kind: str) -> bool:
        try:
            supervisor = is_a(process, MARKS["supervisor"])
            return supervisor if kind == "supervisor" else not supervisor and is_a(process, MARKS[kind])
        except psutil.Error:
            return False

    def _wait_for_end(self, deadline: float) -> None:
        while any(driver.poll() is None for driver in self.drivers):
            self._check_drivers()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished after {RUN_S:.0f} s")
            time.sleep(0.1)
        self._check_drivers()

    def _faults(self, reference: str) -> list[str]:
        """What is wrong with a run that has ended; empty when nothing is."""
        found, folder = [], self.folder
        host = self.ground.hosts.trainer if self.ground.hosts else None
        asking = on(host, [sys.executable, str(DRIVER), str(folder.path), "--progress"])
        states = Progress.model_validate_json(
            subprocess.run(asking, check=True, capture_output=True, timeout=60).stdout
        )
        if states != Progress(consumed=SAMPLES):
            found.append(f"ledger: {states}")
        steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
        if steps != list(range(1, SAMPLES // SAMPLES_PER_STEP + 1)):
            found.append(f"steps: {steps}")
        if weights_hash(folder) != reference:
            found.append("final weights differ from an undisturbed run's")
        left = [
            next((kind for kind in MARKS if self._is(process, kind)), "another") for process in processes_of(folder)
        ]
        found += [f"process left: {kind}" for kind in left]
        found += [f"shared memory left: {path.name}" for path in shared_memory_folder().iterdir()]
        for lock in (folder.run_lock, folder.path / "processes.lock"):
            with hold(lock):
                pass
        return found


def weights_hash(folder: RunFolder) -> str:
    checkpoint = folder.path / TrainingResult.read(folder.training).checkpoint
    return sha256_file(checkpoint / "draft.safetensors") + sha256_file(checkpoint / "averaged.safetensors")
