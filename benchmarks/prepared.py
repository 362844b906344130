"""A run folder with target and samples, and the data plane without a flow, for benchmarks."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.transport.choice import run_memory_folder
from models.config.recipe import load_recipe
from models.data.prepare import prepare_samples, recipe_data
from models.run import PreparedRun
from models.targets.prepare import prepare_target

TRAIN_S = 3600


@contextmanager
def prepared_run(path: Path, recipe: Path, overrides: list[str]) -> Iterator[PreparedRun]:
    """The run, whose place in shared memory is removed at the end."""
    folder, config = RunFolder(path), load_recipe(recipe, overrides)
    target = prepare_target(config.target)
    write_atomically(folder.config, config)
    write_atomically(folder.target, target)
    write_atomically(folder.samples, prepare_samples(recipe_data(config), target, config.target.add_bos))
    try:
        yield PreparedRun.open(path)
    finally:
        shutil.rmtree(run_memory_folder(folder), ignore_errors=True)


def trained_export(path: Path, recipe: Path, overrides: list[str]) -> Path:
    """The draft that a recipe trains. Raises ValueError when a process fails."""
    with prepared_run(path, recipe, overrides) as run:
        capture_train_export(run, TRAIN_S)
        return run.folder.export


def capture_train_export(run: PreparedRun, timeout_s: float) -> None:
    """One generator and one rank, until all samples are trained. Raises ValueError when one fails, TimeoutError."""
    folder, deadline = str(run.folder.path), time.monotonic() + timeout_s
    modules = {"generator": ["models.capture.generator", folder], "trainer": ["models.training.launch", folder]}
    modules["trainer"] += ["--ranks", "1"]
    processes = {role: subprocess.Popen([sys.executable, "-m", *module]) for role, module in modules.items()}
    try:
        while any(process.poll() is None for process in processes.values()):
            _check(processes)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not trained after {timeout_s:.0f} s")
            time.sleep(0.2)
        _check(processes)
    finally:
        for process in processes.values():
            process.kill()
            process.wait(60)
    processes = {"export": subprocess.Popen([sys.executable, "-m", "models.export.sglang", folder])}
    processes["export"].wait(timeout_s)
    _check(processes)


def _check(processes: "Mapping[str, subprocess.Popen[bytes]]") -> None:
    for role, process in processes.items():
        if process.poll():
            raise ValueError(f"the {role} failed: its output is above")
