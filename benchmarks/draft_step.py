"""EAGLE-3's training step, forward and backward: this project's against its plain form and the `speculators` package.

    python benchmarks/draft_step.py [--shapes a b c] [--dtypes float32 bfloat16] [--rounds 3]
    python benchmarks/draft_step.py --memory 1024 2048 4096 8192
    python benchmarks/draft_step.py --recompute 1024 4096 8192

Every contestant is a process of its own with the same weights, batch, dtype (bfloat16: autocast over float32 master
weights) and supervised positions (all), the draft head trained. The package's loss is the KL divergence, this project's
the cross entropy: it differs by the target's entropy and has the same gradient. Contestants take turns, a step each,
beside a product of two 4096 x 4096 matrices: figures are medians over the rounds. Seconds are wall and CPU (of all
threads); where other work shares the cores the ratio of CPU seconds is the better one.
Peak memory is that of the first step, over what the process held with model and inputs made.

`ours` is what a run does by default: the target's top token, sent with the samples, decides which positions count, and
the loss works on chunks of the default size. `text` lets the text's next token decide (`training.out_of_vocabulary`).
`--memory`: peak memory against length, of this project's step and of the plain one, at shape
`memory`; a straight line is fitted.
`--recompute`: what it costs and saves to compute inner activations again (`training.recompute`), at shape a.

Needs `speculators` 0.9.0 and `hs-connectors` 0.9.0, installed without their dependencies.
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from draft_contestants import CHUNK_TOKENS, SHAPES, Shape, make_work, our_step, plain_step, speculators_step
from machine import cpu_info, cpu_model
from torch import Tensor

from infra.files.atomic import write_atomically
from infra.provenance import git_sha, hardware, versions

RESULT = Path(__file__).parent / "results" / "draft_step.json"
CONTESTANTS = ("ours", "speculators")
REPLY_S = 1800.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MATRIX = 4096
# One head and two steps: the plain form's scores of 8K x 8K tokens must fit into a laptop.
MEMORY_SHAPE = replace(SHAPES["a"], vocabulary=16_000, draft_vocabulary=8_000, heads=1, kv_heads=1, steps=2)


def contestant(name: str, shape: Shape, dtype_name: str, threads: int, pipe: Connection) -> None:
    """A process: answers each request with wall and CPU seconds and the loss, the first one with its peak too."""
    torch.set_num_threads(threads)
    dtype = DTYPES[dtype_name]
    step: Callable[[], Tensor]
    if name == "matrix":
        matrix = torch.randn(MATRIX, MATRIX).to(dtype)
        step = lambda: (matrix @ matrix)[0, 0]  # noqa: E731
    else:
        work = make_work(shape, dtype, argmax=name != "text")
        work.draft.recompute = name == "recompute"
        if name == "speculators":
            theirs = speculators_step(work, shape)[1]
            step = lambda: theirs(dtype)  # noqa: E731
        else:
            how = plain_step if name == "plain" else our_step
            step = lambda: how(work, dtype)  # noqa: E731
    answer(step, pipe)


def answer(step: Callable[[], Tensor], pipe: Connection) -> None:
    """A contestant's loop: says that it is ready, then takes a step for each request."""
    pipe.send(None)
    while pipe.recv():
        before = resident_bytes("VmRSS")
        reset_peak()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        figures = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "loss": float(loss)}
        pipe.send(figures | {"peak_bytes": resident_bytes("VmHWM") - before})


def resident_bytes(field: str) -> int:
    """Of this process: `VmRSS` now, or `VmHWM`, its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def reset_peak() -> None:
    """The kernel counts `VmHWM` from here."""
    Path("/proc/self/clear_refs").write_text("5")


class Contest:
    """The processes of one shape and dtype; `body` is what each runs, of its name, these and a pipe."""

    def __init__(
        self, names: tuple[str, ...], shape: Any, dtype: str, threads: int, body: Callable[..., None] = contestant
    ):
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        self.processes = []
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(target=body, args=(name, shape, dtype, threads, theirs), daemon=True)
            process.start()
            self.pipes[name] = ours
            self.processes.append(process)
            self._answer(name)

    def turn(self, name: str) -> dict[str, float]:
        """One step of one contestant, alone."""
        self.pipes[name].send(True)
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        if not self.pipes[name].poll(REPLY_S):
            raise TimeoutError(f"{name} did not answer within {REPLY_S:g} s")
        return self.pipes[name].recv()

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.send(False)
        for process in self.processes:
            process.join(timeout=60)


def compare(shape: Shape, dtype: str, names: tuple[str, ...], rounds: int, threads: int) -> dict[str, Any]:
    """Medians of every contestant, and this project's against the others."""
    contest = Contest((*names, "matrix"), shape, dtype, threads)
    try:
        first = {name: contest.turn(name) for name in (*names, "matrix")}
        turns = [{name: contest.turn(name) for name in (*names, "matrix")} for _ in range(rounds)]
    finally:
        contest.close()
    found = {
        name: {key: median(turn[name][key] for turn in turns) for key in ("wall_s", "cpu_s")}
        | {"peak_mib": first[name]["peak_bytes"] / 2**20, "loss": first[name]["loss"]}
        for name in names
    }
    rate = {key: 2 * MATRIX**3 / median(turn["matrix"][key] for turn in turns) for key in ("wall_s", "cpu_s")}
    flops = sum(shape.flops().values())
    for figures in found.values():
        figures["share_of_matrix_rate"] = flops / figures["cpu_s"] / rate["cpu_s"]
    others = [name for name in names if name not in ("ours", "text")]
    return {
        "contestants": found,
        "matrix_gflop_per_cpu_s": rate["cpu_s"] / 1e9,
        "gflop": flops / 1e9,
        "times_faster": {
            name: {key: median(turn[name][key] / turn["ours"][key] for turn in turns) for key in ("wall_s", "cpu_s")}
            for name in others
        },
        "memory_of": {name: found["ours"]["peak_mib"] / found[name]["peak_mib"] for name in others},
        "rounds": rounds,
    }


def memory_against_length(lengths: list[int], dtype: str) -> dict[str, Any]:
    """Peak memory of one step of a single sample, this project's and the plain one; a line through this project's."""
    found: dict[str, list[float]] = {"ours": [], "plain": []}
    for length in lengths:
        for name, peaks in found.items():
            contest = Contest((name,), replace(MEMORY_SHAPE, lengths=(length,)), dtype, 1)
            try:
                peaks.append(contest.turn(name)["peak_bytes"] / 2**20)
            finally:
                contest.close()
    slope, intercept, worst = straight_line(lengths, found["ours"])
    return {
        "lengths": lengths,
        "peak_mib": found,
        "ours_of_plain_at_the_longest": found["ours"][-1] / found["plain"][-1],
        "ours_kib_per_token": slope * 1024,
        "ours_fixed_mib": intercept,
        "largest_residual_of_the_line": worst,
    }


def straight_line(x: list[int], y: list[float]) -> tuple[float, float, float]:
    """Least squares: slope, intercept, and the largest residual as a share of its value."""
    columns = torch.stack([torch.tensor(x, dtype=torch.float64), torch.ones(len(x), dtype=torch.float64)], dim=1)
    values = torch.tensor(y, dtype=torch.float64)
    fit = torch.linalg.lstsq(columns, values.unsqueeze(-1)).solution.squeeze(-1)
    return float(fit[0]), float(fit[1]), float(((columns @ fit - values) / values).abs().max())


def conditions(threads: int) -> dict[str, Any]:
    """What the figures were measured under."""
    return {
        "commit": git_sha(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "cpu": cpu_model(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in cpu_flags()],
        "versions": versions(),
        "threads": threads,
        "chunk_tokens": CHUNK_TOKENS,
        "load_average": os.getloadavg(),
        "peak_of_this_process_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def cpu_flags() -> list[str]:
    """Instruction sets as Linux names them."""
    return cpu_info("flags").split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["a", "b", "c"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--contestants", nargs="*", default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, nargs="*", default=[], help="lengths; nothing else is measured then")
    parser.add_argument("--recompute", type=int, nargs="*", default=[], help="lengths; likewise")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for length in arguments.recompute:
        shape, dtype = replace(SHAPES["a"], lengths=(length,)), arguments.dtypes[0]
        found = compare(shape, dtype, ("ours", "recompute"), arguments.rounds, arguments.threads)
        print(length, json.dumps(found, indent=2), flush=True)
        result.setdefault("recompute", {})[f"{length} tokens {dtype}"] = found | conditions(arguments.threads)
        write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")
    if arguments.recompute:
        return
    if arguments.memory:
        found = memory_against_length(arguments.memory, arguments.dtypes[0])
        result["memory"] = {"dtype": arguments.dtypes[0]} | found | conditions(1)
        print(json.dumps(found, indent=2), flush=True)
        write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")
        return
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            found = compare(SHAPES[shape], dtype, tuple(arguments.contestants), arguments.rounds, arguments.threads)
            print(shape, dtype, json.dumps(found, indent=2), flush=True)
            result.setdefault("shapes", {})[f"{shape} {dtype}"] = found | conditions(arguments.threads)
            write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
