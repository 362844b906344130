"""What concatenating samples saves: EAGLE-3's step on short samples packed, padded, and one at a time.

    python benchmarks/packing.py [--samples 32] [--rounds 7] [--threads 1]

Lengths are like those of GSM8K: questions of about 60 tokens and solutions of about twice that, lognormal; solutions
are supervised. Three ways take turns over the same samples and weights, a step each, forward and backward: `packed` is
the trainer's own, `padded` gives every sample the length of the longest (nothing of the padding is supervised), `alone`
takes one sample after the other and adds the gradients up. Losses and gradients are compared.

Waste is the share of the draft's rows that hold no sample's token. `idle` is what packing leaves: the share of a step
in which ranks wait for the one with most tokens, over many steps that the ledger's plan balances.
"""

import argparse
import json
import math
import random
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from draft_contestants import CHUNK_TOKENS, SHAPES, Work, make_work
from torch import Tensor

from infra.files.atomic import write_atomically
from infra.ledger.planning import balance
from infra.provenance import git_sha, hardware, versions
from models.drafts.base import PackedSamples, supervised_positions

RESULT = Path(__file__).parent / "results" / "packing.json"
PARTS = (60, 0.35), (120, 0.45)
"""Of question and solution: median of the tokens, and spread of their logarithm."""
SHAPE = SHAPES["a"]
RANKS, STEPS = (2, 4, 8), 200


def lengths(generator: random.Random) -> tuple[int, int]:
    """Tokens of a question and of its solution."""
    question, solution = (max(8, round(middle * math.exp(generator.gauss(0, spread)))) for middle, spread in PARTS)
    return question, solution


def make(samples: int, threads: int) -> Work:
    torch.set_num_threads(threads)
    drawn = [lengths(random.Random(seed)) for seed in range(samples)]
    work = make_work(replace(SHAPE, lengths=tuple(map(sum, drawn))), torch.float32)
    mask = torch.cat([torch.arange(q + s) >= q for q, s in drawn])
    return replace(work, batch=replace(work.batch, loss_mask=mask))


def alone(batch: PackedSamples) -> list[PackedSamples]:
    """Every sample a batch of its own."""
    parts = zip(*(x.split(batch.lengths) for x in (batch.tokens, batch.loss_mask, batch.aux, batch.last)), strict=True)
    return [PackedSamples(tokens, mask, aux, last, (len(tokens),)) for tokens, mask, aux, last in parts]


def padded(batch: PackedSamples) -> list[PackedSamples]:
    """Every sample as long as the longest."""
    longest = max(batch.lengths)

    def filled(whole: Tensor) -> Tensor:
        parts = whole.split(batch.lengths)
        return torch.cat([torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]) for x in parts])

    tokens, mask, aux, last = (filled(x) for x in (batch.tokens, batch.loss_mask, batch.aux, batch.last))
    return [PackedSamples(tokens, mask, aux, last, (longest,) * len(batch.lengths))]


def step(work: Work, batches: list[PackedSamples], total: int) -> tuple[float, Tensor]:
    """Loss and gradients of all batches together."""
    work.draft.zero_grad(set_to_none=True)
    loss = 0.0
    for batch in batches:
        found = work.draft.loss(batch, work.target, total, CHUNK_TOKENS).loss
        found.backward()
        loss += float(found.detach())
    return loss, torch.cat([p.grad.flatten() for p in work.draft.parameters() if p.grad is not None])


def compare(work: Work, rounds: int) -> dict[str, Any]:
    total = len(supervised_positions(work.batch.loss_mask, work.batch.lengths))
    ways = {"packed": [work.batch], "padded": padded(work.batch), "alone": alone(work.batch)}
    first = {name: step(work, batches, total) for name, batches in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, batches in ways.items():
            started = time.process_time()
            step(work, batches, total)
            seconds[name].append(time.process_time() - started)
    tokens = sum(work.batch.lengths)
    loss, gradient = first["packed"]
    return {
        name: {
            "waste": 1 - tokens / sum(sum(batch.lengths) for batch in batches),
            "tokens_per_cpu_s": tokens / median(seconds[name]),
            "packed_is_faster": median(s / p for s, p in zip(seconds[name], seconds["packed"], strict=True)),
            "loss_difference": abs(first[name][0] - loss) / loss,
            "gradient_difference": float((first[name][1] - gradient).norm() / gradient.norm()),
        }
        for name, batches in ways.items()
    }


def idle(samples_per_rank: int) -> dict[str, float]:
    """Share of a step in which ranks wait for the fullest one, by the number of ranks."""
    generator, found = random.Random(0), {}
    for ranks in RANKS:
        shares = []
        for _ in range(STEPS):
            tokens = [sum(lengths(generator)) for _ in range(samples_per_rank * ranks)]
            held = [0] * ranks
            for count, (rank, _) in zip(tokens, balance(tokens, ranks, 1), strict=True):
                held[rank] += count
            shares.append(1 - sum(held) / ranks / max(held))
        found[f"{ranks} ranks"] = sum(shares) / STEPS
    return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args(given)
    work = make(arguments.samples, arguments.threads)
    drawn = work.batch.lengths
    result = {
        "commit": git_sha(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "conditions": f"float32, {arguments.threads} threads, medians of {arguments.rounds} rounds, CPU seconds",
        "sizes": asdict(SHAPE) | {"lengths": None},
        "samples": len(drawn),
        "lengths": {"shortest": min(drawn), "mean": sum(drawn) / len(drawn), "longest": max(drawn)},
        "ways": compare(work, arguments.rounds),
        "idle": idle(arguments.samples),
    }
    print(json.dumps(result, indent=2))
    write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
