"""Trainings of a tiny target's draft: checkpoints, a kill, a resume; several ranks."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from prepared import prepared_run

from gpu_stages.base import Bench, check
from infra.pools.local import LocalPool
from infra.processes.process import Owner
from infra.transport.choice import objects_folder
from infra.transport.mooncake.store import start_store
from models.config.target import TinyRecipe
from models.run import PreparedRun
from models.targets.tiny import trained_tiny

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
SERVABLE = TinyRecipe(hidden_size=256, heads=4, kv_heads=2)
"""The tiny target with heads of 64, the smallest that all attention kernels of GPUs take."""
HALF = (
    "generator.compute_dtype=bfloat16", "generator.stored_dtype=bfloat16", "training.precision=bfloat16",
    "benchmark.compute_dtype=bfloat16",
)  # fmt: skip
TRAINED = "training"
"""Folder of the one-rank run, whose draft is served later."""
POLL_S, END_S = 0.2, 900.0


def recipe_settings(bench: Bench) -> list[str]:
    """Overrides of the tiny recipe."""
    if not bench.is_gpu:
        return ["data.max_tokens=64", "data.max_samples=400", "benchmark.prompts=4", "benchmark.max_new_tokens=16",
                "benchmark.served_concurrency=[2]", "training.max_steps=24", "training.checkpoint_steps=8",
                "training.log_steps=4", "training.heldout_steps=0"]  # fmt: skip
    target = trained_tiny("tiny-llama-64", SERVABLE)
    draft = ["draft.num_heads=4", "draft.num_kv_heads=2", "draft.head_dim=64"]
    return [*HALF, "target.source=huggingface", f"target.name={target}", *draft, "training.checkpoint_steps=100"]


def tiny_training(bench: Bench) -> None:
    """One generator and one rank; both are killed once there is a checkpoint, and started again."""
    with prepared_run(bench.work / TRAINED, RECIPE, recipe_settings(bench)) as run:
        begun = time.monotonic()
        with started(run, 1) as processes:
            wait_until(lambda: bool(committed(run)), processes)
            kill(processes)
        before = committed(run)
        bench.note(killed_at_step=before[-1], seconds_to_the_kill=time.monotonic() - begun)
        finish(run, 1)
        lines = _metrics(run)
        bench.note(
            steps=lines[-1]["step"], tokens_per_s=lines[-1]["tokens_per_s"], wall_s=time.monotonic() - begun,
            data_wait_share=lines[-1]["data_wait_share"], losses={line["step"]: line["loss"] for line in lines},
        )  # fmt: skip
        _check_whole(run, lines)
        subprocess.run([sys.executable, "-m", "models.export.sglang", str(run.folder.path)], check=True, timeout=END_S)


def train_once(bench: Bench, ranks: int, *overrides: str) -> None:
    """A short training without kills."""
    short = [f"training.ranks={ranks}", f"training.max_steps={bench.pick(200, 8)}"]
    settings = [*recipe_settings(bench), *short, *overrides]
    with prepared_run(bench.work / bench.stage, RECIPE, settings) as run:
        begun = time.monotonic()
        finish(run, ranks)
        lines = _metrics(run)
        bench.note(
            steps=lines[-1]["step"], tokens_per_s=lines[-1]["tokens_per_s"], wall_s=time.monotonic() - begun,
            losses={line["step"]: line["loss"] for line in lines},
        )  # fmt: skip
        _check_whole(run, lines)


def data_parallel(bench: Bench) -> None:
    """DDP."""
    train_once(bench, 2)


def sharded(bench: Bench) -> None:
    """FSDP2."""
    train_once(bench, 2, "training.sharded=true")


def context_parallel(bench: Bench) -> None:
    """Two ranks share every sample."""
    train_once(bench, 2, "training.context_parallel_size=2")


def _check_whole(run: PreparedRun, lines: list[dict]) -> None:
    """Every planned sample was trained once, to the last step, and the loss fell."""
    with run.open_ledger() as ledger:
        progress = ledger.progress()
    total = run.config.training.total_steps(run.samples.train_samples)
    check(lines[-1]["step"] == total, f"the last step is {lines[-1]['step']}, not {total}")
    wanted = min(run.samples.train_samples, total * run.config.training.samples_per_step)
    check(progress.consumed == wanted, f"{progress.consumed} samples were trained, not {wanted}")
    check(lines[-1]["loss"] < lines[0]["loss"], f"the loss went from {lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}")


def _metrics(run: PreparedRun) -> list[dict]:
    return [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]


def committed(run: PreparedRun) -> list[int]:
    """Steps of the checkpoints that are whole."""
    return [int(folder.name.split("-")[1]) for folder in run.folder.checkpoint_folders()]


@contextmanager
def started(run: PreparedRun, ranks: int) -> Iterator[Mapping[str, "subprocess.Popen[bytes]"]]:
    """Generator and trainer on this process's GPUs; killed at the end."""
    folder = str(run.folder.path)
    commands = {
        "generator": ["models.capture.generator", folder],
        "trainer": ["models.training.launch", folder, "--ranks", str(ranks)],
    }
    with run.open_ledger() as ledger:
        ledger.reopen()
    with ExitStack() as stack:
        if run.config.transport.kind == "mooncake":
            pool, transport = LocalPool(Owner(run.folder.name, run.folder.logs)), run.config.transport
            objects = objects_folder(transport, run.folder)
            stack.enter_context(start_store(pool, run.folder, transport, objects, print))
        yield stack.enter_context(_running(commands))


@contextmanager
def _running(commands: Mapping[str, list[str]]) -> Iterator[Mapping[str, "subprocess.Popen[bytes]"]]:
    processes = {role: subprocess.Popen([sys.executable, "-m", *command]) for role, command in commands.items()}
    try:
        yield processes
    finally:
        kill(processes)


def finish(run: PreparedRun, ranks: int) -> None:
    """Train to the end. Raises ValueError when a process fails, TimeoutError."""
    with started(run, ranks) as processes:
        wait_until(lambda: all(process.poll() == 0 for process in processes.values()), processes)


def wait_until(condition: Callable[[], bool], processes: Mapping[str, "subprocess.Popen[bytes]"]) -> None:
    """Raises ValueError when a process fails meanwhile, TimeoutError."""
    deadline = time.monotonic() + END_S
    while not condition():
        for role, process in processes.items():
            check(not process.poll(), f"the {role} ended with status {process.poll()}: its output is above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the training took longer than {END_S:.0f} s")
        time.sleep(POLL_S)


def kill(processes: Mapping[str, "subprocess.Popen[bytes]"]) -> None:
    """SIGKILL for them and all that they started."""
    for process in processes.values():
        if process.poll() is None:
            for one in psutil.Process(process.pid).children(recursive=True):
                one.send_signal(signal.SIGKILL)
            process.kill()
        process.wait(60)
