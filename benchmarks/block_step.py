"""The training step of block drafts (forward, backward, optimizer): this project's against the `speculators` package's.

    python benchmarks/block_step.py [--methods dflash dspark] [--shapes a b] [--dtypes float32 bfloat16] [--rounds 5]

Both have the same weights, batch, blocks, loss terms, dtype (bfloat16: autocast over float32 master weights) and fused
AdamW. A test compares their gradients: they are the same but for one factor. Every contestant is a process of its own,
and they take turns, a step each; figures are medians over the rounds. Peak memory is that of the first step, over what
the process held with model, optimizer state and inputs made.

The package runs as it does on a CPU: dense masks, because its flex attention has no backward pass there, and its eager
losses, because the fused ones need Triton. On a GPU it is faster and smaller than that by an unknown factor.

Needs `speculators` 0.9.0 and `hs-connectors` 0.9.0, installed without their dependencies.
"""

import argparse
import json
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from block_contestants import METHODS, SHAPES, BlockShape, make_work, our_step, speculators_step
from draft_step import DTYPES, Contest, answer, conditions

from infra.files.atomic import write_atomically

RESULT = Path(__file__).parent / "results" / "block_step.json"
CONTESTANTS = ("ours", "speculators")


def contestant(name: str, given: tuple[str, BlockShape], dtype_name: str, threads: int, pipe: Connection) -> None:
    """A process (see `draft_step.answer`) of one method and shape."""
    torch.set_num_threads(threads)
    method, shape = given
    dtype = DTYPES[dtype_name]
    work = make_work(method, shape, dtype)
    _, step = (our_step if name == "ours" else speculators_step)(work, dtype)
    answer(step, pipe)


def compare(method: str, shape: BlockShape, dtype: str, rounds: int, threads: int) -> dict[str, Any]:
    """Medians of both, and this project's against the package's."""
    contest = Contest(CONTESTANTS, (method, shape), dtype, threads, contestant)
    try:
        first = {name: contest.turn(name) for name in CONTESTANTS}
        turns = [{name: contest.turn(name) for name in CONTESTANTS} for _ in range(rounds)]
    finally:
        contest.close()
    found = {
        name: {key: median(turn[name][key] for turn in turns) for key in ("wall_s", "cpu_s")}
        | {"peak_mib": first[name]["peak_bytes"] / 2**20, "loss": first[name]["loss"]}
        for name in CONTESTANTS
    }
    return {
        "method": method,
        "shape": asdict(shape),
        "dtype": dtype,
        "contestants": found,
        "times_faster": {
            key: median(turn["speculators"][key] / turn["ours"][key] for turn in turns) for key in ("wall_s", "cpu_s")
        },
        "memory_of_speculators": found["ours"]["peak_mib"] / found["speculators"]["peak_mib"],
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--shapes", nargs="*", default=["a", "b"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    result = json.loads(options.json.read_text()) if options.json.exists() else {}
    for shape in options.shapes:
        for dtype in options.dtypes:
            for method in options.methods:
                found = compare(method, SHAPES[shape], dtype, options.rounds, options.threads)
                print(method, shape, dtype, json.dumps(found, indent=2), flush=True)
                steps = result.setdefault("steps", {})
                under = conditions(options.threads)
                steps[f"{method} {shape} {dtype}"] = found | under
                result |= {name: under[name] for name in ("commit", "at", "hardware")}
                write_atomically(options.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
