"""What ranks that share a sample save: activation memory, and seconds, of EAGLE-3's step on two ranks against one.

    python benchmarks/context_parallel.py [--lengths 1024 2048 4096 8192] [--rounds 5]

Two processes of one thread each, over gloo. At every length they take turns: the first takes a whole step (forward and
backward of one sample, every position supervised) alone, then both take it together. Memory is what torch's allocator
gave during a step over what the process held before it, gradients included there: activations, and what computing needs
for a moment. The dearer of two ranks counts. Loss and gradients of both ways are compared.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from draft_contestants import CHUNK_TOKENS, SHAPES, Shape, Work, make_work
from draft_step import straight_line
from torch.profiler import ProfilerActivity, profile
from trainer_memory import peak_of

from infra.files.atomic import write_atomically
from infra.provenance import git_sha, hardware, versions
from models.drafts.context import ContextShare

RESULT = Path(__file__).parent / "results" / "context_parallel.json"
RANKS = 2
WAIT_S = 600.0
WAYS = {"kept": False, "recomputed": True}
SHAPE = replace(SHAPES["a"], kv_heads=2)


def part_of(work: Work, rank: int) -> Work:
    """What a rank has of the batch: its own rows' features, the last states that they predict."""
    batch = work.batch
    share = ContextShare(batch.lengths, RANKS, rank, work.draft.positions, dist.group.WORLD)
    aux, last = (
        torch.cat([x[run.packed] for run in runs]) for x, runs in ((batch.aux, share.runs), (batch.last, share.states))
    )
    return replace(work, batch=replace(batch, aux=aux, last=last, share=share))


def step(work: Work) -> torch.Tensor:
    """Gradients have their memory before it."""
    for parameter in work.draft.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    loss = work.draft.loss(work.batch, work.target, work.total, CHUNK_TOKENS).loss
    loss.backward()
    return loss.detach()


def measure(work: Work, rounds: int) -> dict[str, Any]:
    for parameter in work.draft.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(work)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        step(work)
        seconds.append(time.perf_counter() - started)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = step(work)
    gradient = torch.cat([p.grad.flatten() for p in work.draft.parameters() if p.grad is not None])
    return {"seconds": median(seconds), "peak_mib": peak_of(profiler) / 2**20, "loss": loss, "gradient": gradient}


def rank(number: int, meeting: str, pipe: Connection) -> None:
    """A process that measures each length it receives, together with the figures of the other ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=meeting, world_size=RANKS, rank=number, timeout=timedelta(seconds=WAIT_S)
    )
    while (asked := pipe.recv()) is not None:
        shape, recompute, rounds = asked
        work = make_work(shape, torch.float32)
        work.draft.recompute = recompute
        alone = measure(work, rounds) if number == 0 else None
        dist.barrier()
        shared = measure(part_of(work, number), rounds)
        for value in (shared["loss"], shared["gradient"]):
            dist.all_reduce(value)
        pipe.send((alone, shared) if number == 0 else (None, {key: shared[key] for key in ("seconds", "peak_mib")}))
    dist.destroy_process_group()


def compare(pipes: list[Connection], shape: Shape, recompute: bool, rounds: int) -> dict[str, Any]:
    for pipe in pipes:
        pipe.send((shape, recompute, rounds))
    answers = []
    for pipe in pipes:
        if not pipe.poll(WAIT_S):
            raise TimeoutError(f"a rank did not answer within {WAIT_S:g} s")
        answers.append(pipe.recv())
    (alone, shared), *_ = answers
    peak = max(one["peak_mib"] for _, one in answers)
    seconds = max(one["seconds"] for _, one in answers)
    return {
        "tokens": shape.tokens,
        "recompute": recompute,
        "alone": {key: alone[key] for key in ("seconds", "peak_mib")},
        "shared": [{key: one[key] for key in ("seconds", "peak_mib")} for _, one in answers],
        "memory_ratio": peak / alone["peak_mib"],
        "speed_up": alone["seconds"] / seconds,
        "loss_difference": float(abs(shared["loss"] - alone["loss"]) / abs(alone["loss"])),
        "gradient_difference": float((shared["gradient"] - alone["gradient"]).norm() / alone["gradient"].norm()),
    }


def per_token(found: list[dict[str, Any]]) -> dict[str, float]:
    """KiB of each further token, by a line through all lengths: without what the loss needs for its chunk."""
    tokens = [one["tokens"] for one in found]
    alone = straight_line(tokens, [one["alone"]["peak_mib"] for one in found])[0] * 1024
    shared = straight_line(tokens, [max(part["peak_mib"] for part in one["shared"]) for one in found])[0] * 1024
    return {"alone_kib": alone, "shared_kib": shared, "ratio": shared / alone}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args(given)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = zip(*(context.Pipe() for _ in range(RANKS)), strict=True)
        processes = [
            context.Process(target=rank, args=(number, f"file://{folder}/meeting", pipe), daemon=True)
            for number, pipe in enumerate(theirs)
        ]
        for process in processes:
            process.start()
        found = []
        for recompute in WAYS.values():
            for length in arguments.lengths:
                shape = replace(SHAPE, lengths=(length,))
                found.append(compare(list(ours), shape, recompute, arguments.rounds))
                print(json.dumps(found[-1]), flush=True)
        for pipe in ours:
            pipe.send(None)
        for process in processes:
            process.join(timeout=WAIT_S)
    result = {
        "commit": git_sha(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "conditions": f"{RANKS} ranks of a thread each, gloo, float32, {CHUNK_TOKENS} positions per chunk of the loss",
        "sizes": asdict(SHAPE) | {"lengths": None},
        "lengths": found,
        "per_token": {
            name: per_token([one for one in found if one["recompute"] == again]) for name, again in WAYS.items()
        },
    }
    write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
