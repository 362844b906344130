"""A target on two machines: a whole run whose generator's SGLang server extends over both, also when one is lost.

    python benchmarks/spanning.py [--samples 200] [--json ...]

Machines are network namespaces on one bridge, each with shared memory of its own: the first has flow, store, trainer
and the generator's first half, the second its other half. The target is a small random Qwen3-MoE. Compared are a server
on one machine, tensor parallelism over two, and data-parallel attention with expert parallelism over two, where either
machine captures; in the last case the second machine's ranks are killed by SIGKILL when a third of the samples is
trained. SGLang runs on the CPU, with what the tests put in place of its GPU kernels. Needs root.
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
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
from machine import cpu_model
from prepared import prepared_run
from stores import FLOW, machines
from target_families import FAMILIES, write
from two_hosts import on

from infra.data_plane.serving import HERE, ServerSpan
from infra.data_plane.start import start_generator, start_trainer
from infra.files.atomic import write_atomically
from infra.files.lines import last_object
from infra.pools.base import LocalCommand
from infra.pools.local import LocalPool
from infra.processes.exit import run_main
from infra.processes.keep_running import Generators, follow
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware, versions
from infra.records.data_path import TrainingResult
from infra.transport.mooncake.store import start_store
from models.config.target import TargetConfig
from models.run import PreparedRun
from models.targets.prepare import prepare_target

RESULT = Path(__file__).parent / "results" / "spanning.json"
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
TIMEOUT_S = 900.0
STEP = 4
"""Samples of a training step."""
TWO = ("pools.machines_per_generator=2", "generator.sglang.tensor_parallel=2")
DIVIDED = (*TWO, "generator.sglang.attention_data_parallel=2", "generator.sglang.expert_parallel=2")
CASES = {
    "one machine": (),
    "tensor parallel": TWO,
    "data-parallel attention": DIVIDED,
    "data-parallel attention, one lost": DIVIDED,
}
PREFILLED = re.compile(r"Prefill batch, #new-seq: (\d+)")


class TwoMachines(LocalPool):
    """The parts of the inference pool."""

    def _place(self, command: Sequence[str], processes: int, index: int | None) -> LocalCommand:
        host = os.environ["SPANNED"].split(",")[index or 0]
        apart = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"] if index else []
        return LocalCommand(on(host, [*apart, *command]), 1)


def target_folder(folder: Path) -> Path:
    """A small random Qwen3-MoE with the tiny target's tokenizer."""
    tiny = prepare_target(TargetConfig(source="tiny", name="tiny-llama", aux_layer_ids=(0, 1, 2)))
    return write(FAMILIES["qwen3_moe"], folder, Path(tiny.path))


def ran(name: str, folder: Path, target: Path, samples: int) -> dict[str, object]:
    """Do a whole run, and report how it ended."""
    settings = [
        f'target={{"source":"huggingface","name":"{target}","aux_layer_ids":[0,1,2]}}',
        f"training.samples_per_step={STEP}", "training.log_steps=1", "draft.vocab_size=700",
        f"data.max_samples={samples}", "generator.engine=sglang", "generator.sglang.requests_in_flight=8",
        "pools.kind=slurm", "transport.kind=mooncake", "transport.budget_mib=8", f"transport.address={FLOW}",
        *CASES[name],
    ]  # fmt: skip
    events: list[str] = []

    def noted(event: str) -> None:
        events.append(event)
        print(event, flush=True)

    begun = time.monotonic()
    with prepared_run(folder / "run", RECIPE, settings) as run, ExitStack() as stack:
        owner, config = Owner("spanning", run.folder.logs), run.config.transport
        pool, home = TwoMachines(owner), LocalPool(owner)
        span = ServerSpan(2, FLOW) if CASES[name] else HERE
        store = stack.enter_context(start_store(home, run.folder, config, folder, print, holders=home, parts=1))
        generator = stack.enter_context(closing(start_generator(pool, run.folder, 0, 1, 1, span)))
        trainer = stack.enter_context(closing(start_trainer(home, run.folder, 1, 1)))
        killer = Killer(run, samples // STEP // 3, begun) if "lost" in name else (lambda: None)
        follow(trainer, Generators([generator]), print, noted, [killer], store)
        result, last = TrainingResult.read(run.folder.training), last_object(run.folder.metrics)
        assert last is not None
        with run.open_ledger() as ledger:
            states = ledger.progress()
        return {
            "steps": result.steps,
            "samples_consumed": states.consumed,
            "samples_quarantined": states.quarantined,
            "last_loss": round(last["loss"], 4),
            "prompts_prefilled": [prefilled(file) for file in logs(run)],
            "restarts": sum("; restart " in event for event in events),
            "seconds": round(time.monotonic() - begun, 1),
        }


def logs(run: PreparedRun) -> list[Path]:
    """The server's, of each machine."""
    return sorted(run.folder.logs.glob("sglang-0*.log"), key=lambda file: len(file.name))


def prefilled(log: Path) -> int:
    return sum(int(found[1]) for found in PREFILLED.finditer(log.read_text(errors="replace")))


class Killer:
    """Kills the second machine's ranks once, after step `at`."""

    def __init__(self, run: PreparedRun, at: int, begun: float) -> None:
        self._run, self._at, self._begun, self._done = run, at, begun, False

    def __call__(self) -> None:
        if time.monotonic() - self._begun > TIMEOUT_S:
            raise TimeoutError(f"the run did not end within {TIMEOUT_S:g} s")
        if self._done:
            return
        last = last_object(self._run.folder.metrics)
        if last is None or last["step"] < self._at:
            return
        self._done = True
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []  # a zombie has none
            if "infra.sglang.member" not in command or str(self._run.folder.path) not in command:
                continue
            for rank in process.children(recursive=True):
                if rank.name().startswith("sglang::sched"):
                    rank.send_signal(signal.SIGKILL)
                    print(f"killed {rank.name()}", flush=True)


def drive(samples: int, names: Sequence[str], answer: Path) -> None:
    """On the first machine: run the cases."""
    os.environ["SGLANG_PLATFORM"] = "draftsmith_test_cpu"
    with tempfile.TemporaryDirectory(prefix="spanning-") as folder:
        os.environ["DRAFTSMITH_SHM"] = folder
        target, cases = target_folder(Path(folder) / "target"), {}
        for number, name in enumerate(names):
            place = Path(folder) / str(number)
            place.mkdir()
            cases[name] = ran(name, place, target, samples)
            print(name, cases[name], flush=True)
    write_atomically(answer, json.dumps(cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.samples, options.cases, options.drive)
        return
    names = [f"span-{os.getpid()}-{side}" for side in "ab"]
    with machines(names, 0), tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "cases.json"
        command = [
            sys.executable,
            __file__,
            "--samples",
            str(options.samples),
            "--drive",
            str(answer),
            "--cases",
            *options.cases,
        ]
        environment = os.environ | {"SPANNED": ",".join(names)}
        subprocess.run(on(names[0], command), env=environment, check=True, timeout=len(CASES) * TIMEOUT_S)
        cases = json.loads(answer.read_text())
    conditions = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "versions": versions(), "target": "random Qwen3-MoE, 4 layers of 64, 4 experts", "samples": options.samples,
    }  # fmt: skip
    write_atomically(options.json, json.dumps({**conditions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
