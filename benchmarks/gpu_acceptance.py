"""Whether Draftsmith works on this machine's GPUs, and how fast: one command for whoever has a GPU.

    make gpu-acceptance
    python benchmarks/gpu_acceptance.py [--only attention,losses] [--minutes 25] [--json gpu_acceptance.json]

At most 25 minutes on one GPU. Every stage runs in a process of its own, with a time limit, and one that fails does not
stop the others, except the first, which looks for the GPU. Stages for two GPUs run where there are two. Writes every
figure with its conditions to gpu_acceptance.json, prints a table, and ends with status 1 unless all stages passed or
had nothing to measure here. Logs are in the folder that is printed. GPUs that runs, followers or other processes use
are not taken.

`--device cpu` tries the stages' code on a CPU, with tiny shapes: it measures nothing.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_stages.base import ABSENT, AbsentError, Bench, Stage
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.files.atomic import write_atomically
from infra.pools.base import Pool, PoolBusyError, PoolSpec
from infra.pools.gpus import read_gpus
from infra.pools.local import LocalPools
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware, versions
from infra.refusal import Refusal
from infra.settings import shared_memory_folder
from infra.sglang.command import sglang_version

ROOT = Path(__file__).parents[1]
STAGES = (
    Stage("doctor", "the machine", "machine.doctor", 120, required=True),
    Stage("attention", "attention against the plain kernel", "kernels.attention", 120),
    Stage("losses", "losses against the CPU", "kernels.losses", 120),
    Stage("experts", "grouped products of experts against the CPU", "kernels.experts", 60),
    Stage("training", "tiny training: checkpoint, kill, resume", "training.tiny_training", 420),
    Stage("lengths", "draft steps of 4K to 128K tokens", "lengths.max_lengths", 300),
    Stage("copies", "copies between host and GPU", "transfers.copies", 60),
    Stage("capture", "SGLang: canary, capture throughput", "serving.capture", 480),
    Stage("served", "the draft in SGLang beside the reference", "serving.served", 480),
    Stage("mooncake", "samples through Mooncake, GPUDirect with RDMA", "transfers.mooncake", 180),
    Stage("tensor", "SGLang on two GPUs: tensor parallel", "serving.tensor_parallel", 300, gpus=2),
    Stage("ddp", "two ranks: DDP", "training.data_parallel", 180, gpus=2),
    Stage("fsdp2", "two ranks: FSDP2", "training.sharded", 180, gpus=2),
    Stage("context", "two ranks share samples", "training.context_parallel", 180, gpus=2),
    Stage("share", "generator and trainer on one GPU", "sharing.share", 300),
    Stage("alternate", "generator and trainer take turns", "sharing.alternate", 300),
)
RUNS = ("share", "alternate")
"""Stages that start runs, which lease GPUs themselves. They come last, so that the lease can be dropped before them."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
MARKS = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}
PACKAGES = (
    "triton", "nvidia-nccl-cu13", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13",
)  # fmt: skip
"""Those whose versions matter here, besides the ones that every result names."""
SHOWN = 6
"""Figures of a stage in the table."""


@dataclass(frozen=True)
class Outcome:
    """What came of one stage."""

    status: str
    seconds: float
    reason: str = ""
    log: str = ""


def _acquire(pools: LocalPools, count: int, owner: Owner) -> Pool:
    try:
        (pool,) = pools.acquire([PoolSpec("training", count, parts=max(1, count))], owner)
    except PoolBusyError as error:
        if count > 1:
            return _acquire(pools, count - 1, owner)
        raise Refusal(f"all GPUs of this machine are in use ({error}): wait, or end what uses them") from error
    return pool


@contextmanager
def leased(gpus: int, work: Path) -> Iterator[Pool]:
    """As many GPUs of this machine, or fewer where others use some. Raises Refusal where they use all."""
    pools, owner = LocalPools(), Owner(f"acceptance-{os.getpid()}", work)
    pool = _acquire(pools, min(gpus, len(pools.gpus)), owner)
    try:
        yield pool
    finally:
        pools.release(owner.name)


def run_stage(
    command: Sequence[str], log: Path, gpus: Sequence[str], limit_s: float, locks: Sequence[int] = ()
) -> Outcome:
    """Run a stage's command on these GPUs to its end, or kill it and its children when its time is over.

    `locks`: descriptors of the lease, which the stage keeps if this process is killed.
    """
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}, start_new_session=True, pass_fds=locks,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_group(process)
    seconds = time.monotonic() - begun
    if status is None:
        return Outcome(FAILED, seconds, f"not done after {limit_s:.0f} s: {last_line(log)}", str(log))
    if status == 0:
        return Outcome(PASSED, seconds, log=str(log))
    return Outcome(SKIPPED if status == ABSENT else FAILED, seconds, last_line(log) or f"status {status}", str(log))


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """The stage and what it left; servers have supervisors, which notice."""
    with suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def last_line(log: Path) -> str:
    """The line that names the last error of a log; without one, the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Expired|error)\b", line)]
    return (errors or lines or [""])[-1][:1000]


def run_here(stage: Stage, bench: Bench) -> None:
    """The stage itself, in this process."""
    try:
        stage.run(bench)
    except AbsentError as absent:
        print(absent, flush=True)
        sys.exit(ABSENT)


def accept(stages: Sequence[Stage], device: str, work: Path, minutes: float, result: Path) -> dict[str, Any]:
    """Run the stages one after the other. Returns what was written: figures, conditions, outcomes.

    Raises Refusal for GPUs that others use.
    """
    wanted = max(stage.gpus for stage in stages) if device == "cuda" else 0
    found = {"conditions": conditions(device), "stages": {}}
    with ExitStack() as lease:
        pool = lease.enter_context(leased(wanted, work))
        deadline, lacking = time.monotonic() + 60 * minutes, ""
        for stage in stages:
            left = deadline - time.monotonic()
            if lacking or left <= 0:
                outcome = Outcome(SKIPPED, 0.0, lacking or f"the {minutes:g} minutes were over")
            elif device == "cuda" and stage.gpus > max(1, len(pool.gpus)):
                outcome = Outcome(SKIPPED, 0.0, f"needs {stage.gpus} GPUs, and there are {len(pool.gpus)}")
            else:
                print(f"{stage.name}: {stage.what} ...", flush=True)
                command = [sys.executable, __file__, "--device", device, "--stage", stage.name, "--work", str(work)]
                # On the CPU a stage is only tried, at whatever speed.
                limit = min(stage.limit_s, left) if device == "cuda" else left
                if stage.name in RUNS:
                    lease.close()
                locks = () if stage.name in RUNS else pool.owner.locks
                outcome = run_stage(command, work / f"{stage.name}.log", pool.gpus[: stage.gpus], limit, locks)
                print(f"{stage.name}: {outcome.status} in {outcome.seconds:.0f} s {outcome.reason}", flush=True)
            bench = Bench(device, work, stage.name)
            figures = json.loads(bench.file.read_text()) if bench.file.is_file() else {}
            found["stages"][stage.name] = {"what": stage.what, **vars(outcome), "figures": figures}
            if stage.required and outcome.status != PASSED:
                lacking = f"not run: {stage.name} failed"
            write_atomically(result, json.dumps(found, indent=1) + "\n")
    return found


def conditions(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    inventory = read_gpus()
    packages = versions()
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        packages["sglang"] = sglang_version()
    except Refusal as error:
        packages["sglang"] = f"none: {error}"
    return {
        "commit": git_sha(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "hardware": hardware(),
        "driver": inventory.driver if inventory else None,
        "gpus": [{"name": gpu.name, "bytes": gpu.total, "links": gpu.links} for gpu in inventory.gpus]
        if inventory
        else [],
        "versions": packages,
    }


def show(found: dict[str, Any]) -> None:
    """A table of the stages, with the first figures of each."""
    table = Table(title="GPU acceptance")
    for column in ("stage", "what", "outcome", "s", "figures, or what went wrong"):
        table.add_column(column, overflow="fold")
    for name, stage in found["stages"].items():
        simple = {key: value for key, value in stage["figures"].items() if isinstance(value, int | float | str)}
        figures = ", ".join(f"{key} {_short(value)}" for key, value in list(simple.items())[:SHOWN])
        status = stage["status"]
        told = stage["reason"] or figures
        table.add_row(name, stage["what"], Text(status, MARKS[status]), f"{stage['seconds']:.0f}", Text(told))
    Console().print(table)


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="stages, with commas; the required ones run too")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--json", type=Path, default=ROOT / "gpu_acceptance.json")
    parser.add_argument("--work", type=Path, help="folder of runs and logs; default: a new one, which is kept")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {stage.name: stage for stage in STAGES}
    if options.stage:
        run_here(by_name[options.stage], Bench(options.device, options.work, options.stage))
        return
    only = [name for name in options.only.split(",") if name]
    if unknown := set(only) - set(by_name):
        raise Refusal(f"--only {options.only}: there is no stage {', '.join(unknown)}; there are {', '.join(by_name)}")
    work = options.work or Path(tempfile.mkdtemp(prefix="draftsmith-acceptance-"))
    work.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in STAGES if not only or stage.required or stage.name in only]
    # Nobody owns the stages' runs, so a run that starts meanwhile would sweep them out of the usual folder.
    with tempfile.TemporaryDirectory(prefix="draftsmith-acceptance-", dir=shared_memory_folder()) as memory:
        os.environ["DRAFTSMITH_SHM"] = memory
        found = accept(chosen, options.device, work, options.minutes, options.json)
    show(found)
    outcomes = found["stages"].items()
    passed = sum(stage["status"] == PASSED for _, stage in outcomes)
    failed = {name: stage for name, stage in outcomes if stage["status"] == FAILED}
    print(f"{passed} of {len(found['stages'])} stages passed; figures: {options.json}; logs: {work}")
    if failed:
        told = (f"{name} failed: {stage['reason']} (whole log: {stage['log']})" for name, stage in failed.items())
        print("\n".join(told), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
