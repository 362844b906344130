"""Scheduled verification (DSpark's algorithm 1) against fixed lookaheads: is predicted goodput what is measured?

    python benchmarks/scheduled.py [RECIPE] --draft EXPORT [--batches 1,4,16] [--prompts 32] [--clock cpu]

The reference decoder on the recipe's target, text sampled at temperature 1, proposals drawn. Half of the prompts
calibrate: temperatures of the confidences, acceptance by position, and step costs by which the scheduler decides. Then
both halves are decoded group by group in turns, with every way to propose: step costs for the predictions are fitted
to the calibrating half's steps of these very turns, because the machine's speed drifts, and goodput is measured on the
other half. Predicted tokens are the scheduler's own expectation, or the acceptance by position of a fixed lookahead.

In this decoder a step costs what its longest chain costs, because rows are padded to it; engines that verify ragged
batches pay for the tokens, by which the scheduler decides. Predictions are for the padded step.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from goodput import CLOCKS
from rich.console import Console
from rich.table import Table
from scheduled_verification import Scheduled, admitted
from sources import numbers
from torch import Tensor

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha
from infra.records.acceptance import Conditions
from infra.records.data_path import Record
from infra.records.goodput import ConfidenceFit, StepTime
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import draft_of, load_contestants
from models.config.benchmark import BenchmarkConfig
from models.config.recipe import load_recipe
from models.data.conversations import source_hash
from models.data.prompts import read_prompts
from models.decoding.acceptance import AcceptedCounts, by_position
from models.decoding.calibration import calibrate, decoded_confidences
from models.decoding.goodput import FittedCosts, fit, predict
from models.decoding.plain import prefill
from models.decoding.speculative import Conversation, decode_together
from models.decoding.stopwatch import StepSeconds, Stopwatch
from models.drafts.batched_proposer import ProposalSource
from models.drafts.sampling import Sampling
from models.targets.model import TargetModel
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LAW, NEVER, TOGETHER = Sampling(1.0), frozenset[int](), 16
SCHEDULED = "scheduled"


class MeasuredWay(Record):
    """A fixed lookahead or the scheduler, at one batch size."""

    way: str
    steps: int
    tokens_per_step: float
    """Of one text, measured."""
    expected_tokens_per_step: float
    verified_per_step: float
    """Proposals of one text that were verified."""
    predicted: float
    """Tokens per second of all texts."""
    measured: float
    error: float
    """Predicted against measured, relatively."""


class ScheduledLoad(Record):
    """All ways at one batch size, decoded in turns."""

    batch: int
    ways: tuple[MeasuredWay, ...]
    against_best_lookahead: float
    """Measured gain of the scheduler over the fastest lookahead; negative for a loss."""
    against_whole_block: float


class ScheduledResult(Record):
    """What is committed."""

    commit: str
    date: str
    clock: str
    conditions: Conditions
    max_new_tokens: int
    confidence: ConfidenceFit
    rates: tuple[float, ...]
    """Acceptance by position on the calibrating prompts."""
    loads: tuple[ScheduledLoad, ...]
    wall_s: float


@dataclass(frozen=True)
class Step:
    """A decoded step in which all texts were still going."""

    seconds: StepSeconds
    expected: float | None
    """Tokens of all texts by the scheduler; None for a fixed lookahead."""
    verified: int
    """Proposals of all texts."""


class Watched:
    """Algorithm 1, whose expectations are written down."""

    def __init__(self) -> None:
        self.expected: list[tuple[float, int]] = []

    def __call__(self, survivals: Tensor, seconds: Callable[[int], float]) -> list[int]:
        kept = admitted(survivals, seconds)
        sums = [float(row[:count].sum()) for row, count in zip(survivals, kept, strict=True)]
        self.expected.append((len(kept) + sum(sums), sum(kept)))
        return kept


@dataclass
class Ground:
    """All that is decoded with."""

    target: TargetModel
    draft: ProposalSource
    block: int
    """Proposals of a block."""
    new_tokens: int
    clock: Callable[[], float]
    seed: int = 0

    def decode(self, prompts: Sequence[Sequence[int]], way: int | Scheduled) -> tuple[list[Step], list[AcceptedCounts]]:
        """Steps in the middle of the texts, and counts of all."""
        source, watched = self.draft, None
        if isinstance(way, Scheduled):
            source, watched = way, Watched()
            way.schedule = watched
        lookahead, texts = way if isinstance(way, int) else self.block, []
        for prompt in prompts:
            self.seed += 1
            law = LAW.seeded(self.seed, self.target.device)
            start = prefill(self.target, prompt, law)
            texts.append(Conversation(self.target, source, start, lookahead, self.new_tokens, NEVER, sampling=law))
        watch = Stopwatch(self.target.device, clock=self.clock)
        decode_together(texts, watch=watch)
        expected = watched.expected if watched else [(None, lookahead * step.texts) for step in watch.steps]
        steps = [Step(step, *told) for step, told in zip(watch.steps, expected, strict=True)]
        # Without the step in which the draft reads the prompts, and those in which a text ends or has ended.
        return [step for step in steps if step.seconds.texts == len(prompts)][1:-1], [
            text.decoded().counts for text in texts
        ]


def costs_of(steps: Sequence[Step], lookahead: int | None) -> FittedCosts:
    """Fits to steps; `lookahead`: what all of them asked the draft for, None: as many as were verified."""
    parts: dict[str, dict[tuple[int, int], list[float]]] = {"draft": {}, "target": {}}
    for each in (step.seconds for step in steps):
        drafting, asked = each.seconds["draft"], each.tokens - 1 if lookahead is None else lookahead
        if asked:
            parts["draft"].setdefault((each.texts, asked), []).append(drafting)
        parts["target"].setdefault((each.texts, each.tokens), []).append(sum(each.seconds.values()) - drafting)
    target, draft = (
        fit([StepTime(batch=at[0], tokens=at[1], seconds=fmean(found)) for at, found in parts[name].items()])
        for name in ("target", "draft")
    )
    return FittedCosts(target, draft)


def measured_way(name: str, own: Sequence[Step], batch: int, expected: float, seconds: float) -> MeasuredWay:
    """`expected` tokens of all texts and `seconds`, both of a step."""
    emitted, spent = sum(step.seconds.emitted for step in own), sum(sum(step.seconds.seconds.values()) for step in own)
    predicted, measured = expected / seconds, emitted / spent
    return MeasuredWay(
        way=name, steps=len(own), tokens_per_step=emitted / len(own) / batch, expected_tokens_per_step=expected / batch,
        verified_per_step=fmean(step.verified for step in own) / batch, predicted=predicted, measured=measured,
        error=predicted / measured - 1,
    )  # fmt: skip


def load(
    ground: Ground, halves: Sequence[Sequence[list[int]]], batch: int, scheduled: Scheduled, rates: Sequence[float]
) -> ScheduledLoad:
    """All ways at one batch size, both halves of the prompts in turns."""
    lookaheads = sorted({0, 1, 2, ground.block // 2, ground.block})
    ways: dict[str, int | Scheduled] = {str(at): at for at in lookaheads} | {SCHEDULED: scheduled}
    steps: dict[str, tuple[list[Step], list[Step]]] = {name: ([], []) for name in ways}
    for first in range(0, len(halves[0]), batch):
        for name, way in ways.items():
            for half, own in zip(halves, steps[name], strict=True):
                own.extend(ground.decode(half[first : first + batch], way)[0])
    fixed = costs_of([step for name in map(str, lookaheads) for step in steps[name][0]], None)
    rows = []
    for at in lookaheads:
        told = predict(fixed, rates, batch, at)
        rows.append(measured_way(str(at), steps[str(at)][1], batch, batch * told.tokens_per_step, told.step_s))
    calibrating, own = steps[SCHEDULED]
    # Its drafting includes the decision; its verification is padded to the longest chain.
    drafting = fmean(step.seconds.seconds["draft"] for step in calibrating)
    verifying = fmean(fixed.target.seconds(batch, step.seconds.tokens) for step in own)
    expected = fmean(step.expected for step in own if step.expected is not None)
    rows.append(measured_way(SCHEDULED, own, batch, expected, drafting + verifying))
    best, whole = max(row.measured for row in rows[:-1]), rows[-2].measured
    return ScheduledLoad(
        batch=batch, ways=tuple(rows), against_best_lookahead=rows[-1].measured / best - 1,
        against_whole_block=rows[-1].measured / whole - 1,
    )  # fmt: skip


def first_costs(ground: Ground, prompts: Sequence[list[int]], batches: Sequence[int]) -> FittedCosts:
    """By which the scheduler decides."""
    steps: list[Step] = []
    ground.decode(prompts[: max(batches)], ground.block)  # warms up
    for batch in batches:
        for at in sorted({0, 1, ground.block // 2, ground.block}):
            steps += ground.decode(prompts[:batch], at)[0]
    return costs_of(steps, None)


def measure(options: argparse.Namespace) -> ScheduledResult:
    begun, commit, recipe = time.perf_counter(), git_sha(), load_recipe(options.recipe)
    target, batches = prepare_target(recipe.target), numbers(options.batches, "--batches", 1)
    config = BenchmarkConfig.model_validate({
        **recipe.benchmark.model_dump(), "prompts": 2 * options.prompts, "max_new_tokens": options.max_new_tokens,
        "sampled_proposals": "drawn", "loads": tuple(batches),
    })  # fmt: skip
    prompts, template_hash = read_prompts(recipe.data.source, target, config, "none", recipe.target.add_bos)
    loaded = load_contestants(Path(target.path), [options.draft], torch.float32)
    settings = draft_of(loaded.draft).config
    if not settings.confident:
        raise ValueError(f"{options.draft}: its draft has no confidence head; give an export of DSpark")
    block = settings.lookaheads(64)[-1]
    ground = Ground(loaded.target, loaded.draft, block, options.max_new_tokens, CLOCKS[options.clock])
    halves = prompts[::2], prompts[1::2]
    logits, accepted = [], []
    for first in range(0, len(halves[0]), TOGETHER):
        laws = [LAW.seeded(10_000 + first + row, loaded.target.device) for row in range(TOGETHER)]
        texts = [
            (prefill(loaded.target, prompt, own), own) for prompt, own in zip(halves[0][first:], laws, strict=False)
        ]
        told = decoded_confidences(loaded.draft, texts, block, options.max_new_tokens, loaded.target, NEVER)
        logits.append(told[0])
        accepted.append(told[1])
    counts = torch.cat(accepted)
    confidence = calibrate(torch.cat(logits), counts)
    rates = tuple(rate or 0.0 for rate in by_position([AcceptedCounts(block, tuple(counts.tolist()), 0)], block))
    scheduled = Scheduled(loaded.draft, first_costs(ground, halves[0], batches), confidence.temperatures)
    loads = []
    for batch in batches:
        loads.append(load(ground, halves, batch, scheduled, rates))
        Console(width=120).print(shown(loads[-1]))
    under = conditions(
        config, Counter.reference(loaded.target), target=target, draft=options.draft,
        dataset_hash=source_hash(recipe.data.source), template_hash=template_hash, prompts=len(prompts),
    )  # fmt: skip
    return ScheduledResult(
        commit=commit, date=time.strftime("%Y-%m-%d"), clock=options.clock,
        conditions=under.model_copy(update={"concurrency": max(batches)}), max_new_tokens=options.max_new_tokens,
        confidence=confidence, rates=rates, loads=tuple(loads), wall_s=time.perf_counter() - begun,
    )  # fmt: skip


def shown(found: ScheduledLoad) -> Table:
    """For people."""
    table = Table(title=f"{found.batch} texts at once: {found.against_best_lookahead:+.1%} over the best lookahead")
    for name in ("way", "tokens per step", "expected", "verified", "predicted tokens/s", "measured", "error"):
        table.add_column(name, justify="right")
    for row in found.ways:
        table.add_row(
            row.way, f"{row.tokens_per_step:.2f}", f"{row.expected_tokens_per_step:.2f}",
            f"{row.verified_per_step:.2f}", f"{row.predicted:.1f}", f"{row.measured:.1f}", f"{row.error:+.1%}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--draft", type=Path, required=True, help="exported DSpark draft for its target")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompts", type=int, default=32, help="of each half")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options)
    path = options.out or RESULTS / f"scheduled-{options.recipe.stem}.json"
    write_atomically(path, result)
    print(f"{result.wall_s:.0f} s: {path}")


if __name__ == "__main__":
    run_main(main)
