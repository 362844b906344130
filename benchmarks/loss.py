"""The streamed losses against plain ones: seconds, peak memory, and how far loss and gradients differ.

    python benchmarks/loss.py [--shapes tiny a] [--positions 512] [--rounds 3]

One loss of `positions` positions and the shape's steps, forward and backward, the draft's head trained. The plain loss
is written with whole logits and autograd. Both run in processes of their own in turn; seconds are CPU seconds of one
thread, medians over the rounds; peak memory is that of the first turn, over weights and inputs.
Loss and gradients of both are compared with the plain loss in float64, gradients by a random projection of each, over
its norm. LK losses have a kink where draft and target agree on a token: there rounding decides the gradient's side.
"""

import argparse
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from draft_contestants import CHUNK_TOKENS, SHAPES, Shape
from draft_step import REPLY_S, conditions, reset_peak, resident_bytes
from torch import Tensor

from infra.files.atomic import write_atomically
from models.config.draft_base import LossChoice
from models.losses.chunked import TargetDistribution, chunked_loss
from models.losses.divergences import chosen_divergence

RESULT = Path(__file__).parent / "results" / "loss.json"
KINDS = ("kl", "lk_alpha", "lk_lambda")
TIMED = ("streamed", "plain")
EXACT = "plain, float64"


def inputs(shape: Shape, positions: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Draft hidden states of every step, draft head, target hidden states, target head; the same in every dtype."""
    g = torch.Generator().manual_seed(0)

    def random(rows: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(rows, shape.hidden, generator=g)).to(dtype)

    hidden = [random(positions).requires_grad_() for _ in range(shape.steps)]
    head = random(shape.draft_vocabulary, 0.05).requires_grad_()
    return hidden, head, random(positions), random(shape.draft_vocabulary, 0.05)


def streamed(kind: str, hidden: list[Tensor], head: Tensor, last: Tensor, target: Tensor) -> Tensor:
    """This project's."""
    weights = torch.full((len(last), len(hidden)), 1 / len(last))
    divergence = chosen_divergence(LossChoice.model_validate({"loss": kind}))
    return chunked_loss(hidden, head, weights, TargetDistribution(last, target), divergence, CHUNK_TOKENS).loss


def plain(kind: str, hidden: list[Tensor], head: Tensor, last: Tensor, target: Tensor) -> Tensor:
    """As the papers write it."""
    log_p = (last @ target.T).log_softmax(-1)
    loss = torch.zeros(())
    for step in hidden:
        log_q = (step @ head.T).log_softmax(-1)
        cross = -(log_p.exp() * log_q).sum(-1)
        if kind != "kl":
            log_a = torch.minimum(log_q, log_p).logsumexp(-1)
            w = (-LossChoice().lk_decay * log_a.detach().exp()).exp()
            divergence = cross + (log_p.exp() * log_p).sum(-1)
            cross = -log_a if kind == "lk_alpha" else w * divergence + (1 - w) * (1 - log_a.exp())
        loss = loss + cross.mean()
    return loss


def worker(name: str, kind: str, shape: Shape, positions: int, pipe: Connection) -> None:
    """A process: a turn for every request."""
    torch.set_num_threads(1)
    given = inputs(shape, positions, torch.float64 if name == EXACT else torch.float32)
    trained = [*given[0], given[1]]
    how = streamed if name == "streamed" else plain
    while pipe.recv():
        before = resident_bytes("VmRSS")
        reset_peak()
        started = time.process_time()
        loss = how(kind, *given)
        gradients = torch.autograd.grad(loss, trained)
        seconds, peak = time.process_time() - started, resident_bytes("VmHWM") - before
        # Norms would hide differences, whole gradients are large: a projection of each.
        shadows = [
            float((x * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).sum()) for x in gradients
        ]
        sizes = [float(x.norm()) for x in gradients]
        pipe.send({"cpu_s": seconds, "peak_bytes": peak, "loss": loss.item(), "shadows": shadows, "norms": sizes})
        del gradients, loss


def compare(kind: str, shape: Shape, positions: int, rounds: int) -> dict[str, Any]:
    """The timed ones in turn; the exact one once."""
    context = multiprocessing.get_context("spawn")
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in (EXACT, *TIMED)}
    workers = {}
    for name in turns:
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(name, kind, shape, positions, theirs), daemon=True)
        process.start()
        workers[name] = (process, ours)
    for name in (EXACT, *TIMED * (rounds + 1)):
        _, pipe = workers[name]
        pipe.send(True)
        if not pipe.poll(REPLY_S):
            raise TimeoutError(f"{name} did not answer within {REPLY_S:g} s")
        turns[name].append(pipe.recv())
    for process, pipe in workers.values():
        pipe.send(False)
        process.join(timeout=60)
    exact = turns[EXACT][0]
    return {
        "cpu_s": {name: median(turn["cpu_s"] for turn in turns[name][1:]) for name in TIMED},
        "peak_mib": {name: turns[name][0]["peak_bytes"] / 2**20 for name in TIMED},
        "loss_off_float64": {name: abs(turns[name][0]["loss"] / exact["loss"] - 1) for name in TIMED},
        "largest_gradient_off_float64": {name: farthest(turns[name][0], exact) for name in TIMED},
    }


def farthest(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """Of all gradients the largest difference, relative to its norm."""
    pairs = zip(found["shadows"], exact["shadows"], exact["norms"], strict=True)
    return max(abs(one - other) / norm for one, other, norm in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["tiny", "a"], choices=SHAPES)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"positions": arguments.positions, "rounds": arguments.rounds} | conditions(1)
    for name in arguments.shapes:
        shape = SHAPES[name]
        for kind in KINDS:
            found = compare(kind, shape, arguments.positions, arguments.rounds)
            print(name, kind, json.dumps(found), flush=True)
            result.setdefault("shapes", {}).setdefault(name, {})[kind] = found
            write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
