"""What speculative decoding of several texts costs, by batch and lookahead; writes benchmarks/results/batched.json.

    python benchmarks/batched.py --target T [--draft D] --prompts FILE [--batches 1,4,16] [--lookaheads 0,1,2,4,6]

For the first source (the draft, else the first baseline): seconds of target forward, draft, decisions and realignment
(masks, positions, moving accepted columns, letting finished texts go), counted while all texts of a batch are still
going, so that the batch is what it says. From these steps the cost model is fitted and goodput predicted, to be
compared with what was measured; then the online policy decodes the same prompts with that cost model.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from sources import Ground, add_arguments, load, numbers

from infra.exit import run_main
from infra.files import write_atomically
from infra.goodput import GoodputTable, StepTime
from infra.records import Record
from infra.results import Conditions
from models.benchmark.acceptance import acceptance_length, by_position
from models.benchmark.goodput import FittedCosts, fit, goodput_table, shown
from models.decoding.policy import LookaheadPolicy
from models.decoding.speculative import Decoded, Lookahead, speculate_together
from models.decoding.stopwatch import StepSeconds, Stopwatch

RESULTS = Path(__file__).parent / "results"
POLICY = "policy"


class BatchedCell(Record):
    """One lookahead at one batch size, the repetition of median speed."""

    batch: int
    lookahead: str
    """A number, or the online policy."""
    steps: int
    """With all texts still going."""
    acceptance_length: float
    seconds: dict[str, float]
    """By part, of those steps."""
    realign_share: float
    tokens_per_s: float
    slowest_tokens_per_s: float
    fastest_tokens_per_s: float
    """Of all repetitions."""


class BatchedResult(Record):
    """What is committed."""

    conditions: Conditions
    source: str
    repeats: int
    step_times: tuple[StepTime, ...]
    """Median seconds of the target's forward."""
    draft_times: tuple[StepTime, ...]
    """Median seconds of drafting."""
    goodput: GoodputTable
    """Predicted from them."""
    cells: tuple[BatchedCell, ...]
    predicted_shortfall: dict[int, float]
    """By batch: how much slower the lookahead predicted as best was measured than the best measured one, relatively."""
    under_load: dict[str, float]
    """Mean tokens/s over all batch sizes, each for the same time: by fixed lookahead, and of the policy."""
    wall_s: float


def measure(options: argparse.Namespace) -> BatchedResult:
    """Every batch size with every lookahead, then with the policy."""
    begun = time.perf_counter()
    batches, lookaheads = numbers(options.batches, "--batches", 1), numbers(options.lookaheads, "--lookaheads", 0)
    ground = load(options, max(batches) * options.groups, max([1, *lookaheads]))
    name = next(iter(ground.sources))
    if len(ground.prompts) < max(batches):
        raise ValueError(f"{len(ground.prompts)} prompts: {max(batches)} are decoded at once, give more text")
    cells, steps, counted = [], [], []
    for batch in batches:
        for lookahead in lookaheads:
            cell, seen, decoded = repeat(options, ground, batch, lookahead)
            cells.append(cell)
            steps += [step for step in seen if step.tokens == lookahead + 1]
            counted += decoded if lookahead == max(lookaheads) else []
    rates = [rate or 0.0 for rate in by_position([each.counts for each in counted], max(lookaheads))]
    target_times = medians([(step.texts, step.tokens, step.seconds["target"]) for step in steps])
    drafting = [(step.texts, step.tokens - 1, step.seconds["draft"]) for step in steps if step.tokens > 1]
    draft_times = medians(drafting)
    costs = FittedCosts(fit(target_times), fit(draft_times))
    predicted = goodput_table(costs, rates, batches)
    for batch in batches:
        cells.append(repeat(options, ground, batch, LookaheadPolicy(costs, rates))[0])
    return BatchedResult(
        conditions=ground.conditions.model_copy(update={"concurrency": max(batches)}),
        source=name,
        repeats=options.repeats,
        step_times=target_times,
        draft_times=draft_times,
        goodput=predicted,
        cells=tuple(cells),
        predicted_shortfall={batch: shortfall(cells, predicted, batch, lookaheads) for batch in batches},
        under_load={
            at: statistics.fmean(cell.tokens_per_s for cell in cells if cell.lookahead == at)
            for at in [*map(str, lookaheads), POLICY]
        },
        wall_s=time.perf_counter() - begun,
    )


def repeat(
    options: argparse.Namespace, ground: Ground, batch: int, lookahead: Lookahead
) -> tuple[BatchedCell, list[StepSeconds], list[Decoded]]:
    """Decode some groups of prompts, several times over, after one group that warms up."""
    runs = []
    decode(options, ground, ground.prompts[:batch], lookahead)
    for _ in range(options.repeats):
        steps: list[StepSeconds] = []
        decoded: list[Decoded] = []
        for first in range(0, len(ground.prompts) - batch + 1, batch)[: options.groups]:
            found, seen = decode(options, ground, ground.prompts[first : first + batch], lookahead)
            decoded += found
            steps += [step for step in seen if step.texts == batch]
        runs.append((sum(step.emitted for step in steps) / seconds_of(steps), steps, decoded))
    runs.sort(key=lambda run: run[0])
    speed, steps, decoded = runs[len(runs) // 2]
    parts = {part: sum(step.seconds[part] for step in steps) for part in steps[0].seconds}
    cell = BatchedCell(
        batch=batch,
        lookahead=POLICY if isinstance(lookahead, LookaheadPolicy) else str(lookahead),
        steps=len(steps),
        acceptance_length=acceptance_length([each.counts for each in decoded]),
        seconds=parts,
        realign_share=parts["realign"] / sum(parts.values()),
        tokens_per_s=speed,
        slowest_tokens_per_s=runs[0][0],
        fastest_tokens_per_s=runs[-1][0],
    )
    shares = ", ".join(f"{part} {seconds / sum(parts.values()):.1%}" for part, seconds in parts.items())
    print(f"batch {batch}, lookahead {cell.lookahead}: {speed:.1f} tokens/s; {shares}", flush=True)
    return cell, [step for _, steps, _ in runs for step in steps], decoded


def decode(
    options: argparse.Namespace, ground: Ground, prompts: Sequence[Sequence[int]], lookahead: Lookahead
) -> tuple[list[Decoded], list[StepSeconds]]:
    """One group; no text ends before its maximum length, so that the batch stays whole for long."""
    target, source = ground.loaded.target, next(iter(ground.sources.values()))
    watch = Stopwatch(target.device)
    found = speculate_together(target, source, prompts, lookahead, options.max_new_tokens, frozenset(), watch=watch)
    return found, watch.steps


def seconds_of(steps: Sequence[StepSeconds]) -> float:
    return sum(seconds for step in steps for seconds in step.seconds.values())


def medians(times: Sequence[tuple[int, int, float]]) -> tuple[StepTime, ...]:
    """One step time for each batch and number of tokens."""
    found: dict[tuple[int, int], list[float]] = {}
    for batch, tokens, seconds in times:
        found.setdefault((batch, tokens), []).append(seconds)
    return tuple(
        StepTime(batch=batch, tokens=tokens, seconds=statistics.median(of)) for (batch, tokens), of in found.items()
    )


def shortfall(cells: Sequence[BatchedCell], predicted: GoodputTable, batch: int, lookaheads: Sequence[int]) -> float:
    """Among the lookaheads that were measured."""
    measured = {cell.lookahead: cell.tokens_per_s for cell in cells if cell.batch == batch}
    expected = {row.lookahead: row.tokens_per_s for row in predicted.rows if row.batch == batch}
    best = max(lookaheads, key=lambda at: expected[at])
    return 1 - measured[str(best)] / max(measured[str(at)] for at in lookaheads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--lookaheads", default="0,1,2,4,6")
    parser.add_argument("--groups", type=int, default=4, help="batches of prompts decoded in each repetition")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    result = measure(options)
    path = options.out or RESULTS / "batched.json"
    write_atomically(path, result)
    Console().print(shown(result.goodput))
    print("under a load that rises and falls:", {at: round(speed, 1) for at, speed in result.under_load.items()})
    print(f"{result.wall_s:.0f} s: {path}")


if __name__ == "__main__":
    run_main(main)
