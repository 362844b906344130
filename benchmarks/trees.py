"""Is the predicted goodput of trees what is measured, and is the chosen tree never worse than the best chain?

    python benchmarks/trees.py [RECIPE] [--draft EXPORT] [--batches 1,4,16] [--most 5] [--repeats 3] [--clock wall]

The reference decoder on the recipe's target, greedy, with a draft that is trained here unless one is given. What chains
and trees would have held is counted by walks over the target's own texts. With step costs of a first pass the product's
rule chooses a tree for every batch size. Then the texts are decoded for real: with every lookahead, with that tree,
with the best one of another top-k, and with the smallest tree. Predictions are made from steps of other prompts that
are decoded in between. Steps in the middle of the texts count.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from goodput import CLOCKS, Setup, medians, prepare
from prepared import trained_export
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sources import numbers

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.acceptance import Conditions
from infra.records.data_path import Record
from infra.records.goodput import CostFit
from models.benchmark.best_trees import SIZES, Shape, sizes_at
from models.config.benchmark import BenchmarkConfig
from models.config.recipe import load_recipe
from models.decoding.acceptance import acceptance_length, by_position
from models.decoding.goodput import FittedCosts, fit, predict
from models.decoding.simulated import read_texts
from models.decoding.stopwatch import StepSeconds, Stopwatch
from models.decoding.tree_walk import ranks_of_texts, walk_tree
from models.drafts.batched_proposer import BranchingSource
from models.drafts.trees import DynamicTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TOPK = (2, 4)
LEAST_GROUPS = 4
"""Of texts that are decoded together, in a repetition: one group of many texts takes no longer than a disturbance."""

Way = int | DynamicTree
"""A lookahead or a tree."""
Timed = dict[tuple[int, Way], list[list[StepSeconds]]]
"""Steps by batch size and way, a list for each repetition."""


class Ways(NamedTuple):
    """What is decoded at one batch size."""

    calibrating: list[Way]
    measured: list[Way]


@dataclass(frozen=True)
class DecoderCosts(FittedCosts):
    """Costs in this decoder, where choosing a tree's places, its masks and its accepted path take time, too."""

    tree_target: CostFit
    """Verifying trees, by tokens."""
    trees: dict[int, CostFit]
    """Drafting by depth, for each top-k."""

    def tree_seconds(self, batch: int, depth: int, topk: int, tokens: int) -> float:
        return self.tree_target.seconds(batch, tokens + 1) + self.trees[topk].seconds(batch, depth)


class MeasuredShape(Record):
    """One way to propose at one batch size."""

    shape: str
    """A lookahead, or a tree as `draftsmith bench` takes it."""
    tokens_per_step: float
    """By the walk."""
    predicted: float
    """Tokens per second of all texts."""
    measured: float
    error: float
    """Predicted against measured, relatively."""


class MeasuredLoad(Record):
    """One batch size; the first tree is the one that the rule chooses."""

    batch: int
    chains: tuple[MeasuredShape, ...]
    trees: tuple[MeasuredShape, ...]
    against_best_chain: float
    """Gain of the chosen tree over the fastest measured lookahead; negative for a loss."""
    better: str
    """What the rule runs: the tree, or the lookahead predicted to be fastest."""
    better_against_best_chain: float


class TreesResult(Record):
    """What is committed."""

    commit: str
    date: str
    hardware: str
    clock: str
    repeats: int
    conditions: Conditions
    loads: tuple[MeasuredLoad, ...]
    wall_s: float


def calibrating(batch: int, most: int, sizes: Sequence[int]) -> list[Way]:
    """Ways whose steps costs are fitted to: none is measured against them, for those decode other prompts."""
    trees = [
        DynamicTree(depth, topk, size)
        for topk in TOPK
        for depth in (2, most)
        for size in sorted({sizes[0], sizes[-1]})
        if depth <= size <= most_tokens(depth, topk)
    ]
    return [0, 1, most // 2, most, *trees]


def costs_of(timed: Timed) -> DecoderCosts:
    """Fits to steps in which all texts were still going."""
    steps = [(way, step) for (batch, way), own in timed.items() for each in own for step in each if step.texts == batch]

    def verifying(trees: bool) -> CostFit:
        own = [step for way, step in steps if isinstance(way, DynamicTree) == trees]
        return fit(medians([(each.texts, each.tokens, _seconds(each) - each.seconds["draft"]) for each in own]))

    def drafting(topk: int) -> CostFit:
        """Of trees of this top-k; of chains for 1."""
        own = [
            (each.texts, way if isinstance(way, int) else way.depth, each.seconds["draft"])
            for way, each in steps
            if way != 0 and (1 if isinstance(way, int) else way.topk) == topk
        ]
        return fit(medians(own))

    return DecoderCosts(verifying(trees=False), drafting(1), verifying(trees=True), {k: drafting(k) for k in TOPK})


def taking_turns(setup: Setup, ways: dict[int, Ways], repeats: int, groups: int | None = None) -> tuple[Timed, Timed]:
    """Steps of the ways that calibrate and of those that are measured, by batch size and way, one list a repetition.

    Of all texts, or of the first `groups` groups. Both kinds alternate in every group: a machine whose speed changes by
    a third within minutes does so for both.
    """
    fitted: Timed = {}
    measured: Timed = {}
    for _ in track(range(repeats), console=Console(stderr=True), description="decoding"):
        for batch, (calibration, own) in ways.items():
            for kind, group in ((fitted, calibration), (measured, own)):
                for way in group:
                    kind.setdefault((batch, way), []).append([])
            firsts = range(0, len(setup.prompts), batch)
            times = max(1, LEAST_GROUPS // len(firsts))
            for first in islice(chain.from_iterable(repeat(firsts, times)), groups):
                for pair in zip_longest(calibration, own):
                    for kind, prompts, way in zip(
                        (fitted, measured), (setup.calibration, setup.prompts), pair, strict=True
                    ):
                        if way is None:
                            continue
                        watch = Stopwatch(setup.target.device, clock=setup.clock)
                        setup.decode(prompts[first : first + batch], way, watch)
                        # As in the middle of long texts: without the step in which the draft reads the prompts, and
                        # those in which a text ends or has ended.
                        kind[batch, way][-1] += [step for step in watch.steps if step.texts == batch][1:-1]
    return fitted, measured


def _seconds(step: StepSeconds) -> float:
    return sum(step.seconds.values())


def most_tokens(depth: int, topk: int) -> int:
    """Places that a tree of this depth has."""
    return topk + (depth - 1) * topk**2


def walked(setup: Setup) -> tuple[list[float], dict[Shape, float]]:
    """Acceptance of chains by position, and the acceptance length of every tree, over the measured prompts' texts."""
    own = [text.tokens for text in setup.decode(setup.prompts, 0)[1]]
    prompts = [list(read.prompt) for read in setup.prompts]
    readings = read_texts(setup.target, [[*prompt, *text] for prompt, text in zip(prompts, own, strict=True)])
    source = setup.source
    if not isinstance(source, BranchingSource):
        raise ValueError(f"no engine serves trees of {type(source).__name__}: give a recipe of EAGLE-3")
    lengths: dict[Shape, float] = {}
    for topk in TOPK:
        ranks = ranks_of_texts(source, readings, [len(text) for text in own], topk, setup.most)
        for depth in range(2, setup.most + 1):
            for size in SIZES:
                if depth <= size <= most_tokens(depth, topk):
                    counts = [walk_tree(each, depth, size, ended=False) for each in ranks]
                    lengths[depth, topk, size] = acceptance_length(counts)
    _, texts = setup.decode(setup.prompts, setup.most)
    rates = by_position([text.decoded().counts for text in texts], setup.most)
    return [rate or 0.0 for rate in rates], lengths


def chosen(costs: DecoderCosts, lengths: dict[Shape, float], batch: int, sizes: Sequence[int]) -> list[Way]:
    """The best tree, the best one of another top-k, and the smallest one."""

    def speed(shape: Shape) -> float:
        return lengths[shape] / costs.tree_seconds(batch, *shape)

    allowed = [shape for shape in lengths if shape[2] in sizes]
    best = max(allowed, key=speed)
    other = max((shape for shape in allowed if shape[1] != best[1]), key=speed)
    smallest = min(allowed, key=lambda shape: (shape[2], shape[0], shape[1]))
    return [DynamicTree(*shape) for shape in dict.fromkeys([best, other, smallest])]


@dataclass(frozen=True)
class Predictions:
    """What is predicted from."""

    costs: DecoderCosts
    rates: list[float]
    lengths: dict[Shape, float]

    def of(self, way: Way, batch: int) -> tuple[float, float]:
        """Tokens per step of a text, tokens per second of all."""
        if isinstance(way, int):
            expected = predict(self.costs, self.rates, batch, way)
            return expected.tokens_per_step, expected.tokens_per_s
        shape = (way.depth, way.topk, way.tokens)
        return self.lengths[shape], batch * self.lengths[shape] / self.costs.tree_seconds(batch, *shape)


def load_of(predictions: Predictions, ways: Ways, measured: Timed, batch: int) -> MeasuredLoad:
    """All ways at one batch size."""
    rows = []
    for way in ways.measured:
        speeds = [sum(step.emitted for step in each) / sum(map(_seconds, each)) for each in measured[batch, way]]
        length, predicted = predictions.of(way, batch)
        name = str(way) if isinstance(way, int) else f"dynamic-{way.depth}-{way.topk}-{way.tokens}"
        rows.append(MeasuredShape(
            shape=name, tokens_per_step=length, predicted=predicted, measured=statistics.median(speeds),
            error=predicted / statistics.median(speeds) - 1,
        ))  # fmt: skip
    chains = tuple(row for row, way in zip(rows, ways.measured, strict=True) if isinstance(way, int))
    trees = tuple(rows[len(chains) :])
    fastest = max(row.measured for row in chains)
    better = max((*chains, trees[0]), key=lambda row: row.predicted)
    return MeasuredLoad(
        batch=batch, chains=chains, trees=trees, against_best_chain=trees[0].measured / fastest - 1,
        better=better.shape, better_against_best_chain=better.measured / fastest - 1,
    )  # fmt: skip


def measure(options: argparse.Namespace, draft: Path) -> TreesResult:
    begun, commit = time.perf_counter(), git_sha()
    batches, recipe = numbers(options.batches, "--batches", 1), load_recipe(options.recipe)
    config = recipe.benchmark.model_copy(
        update={"prompts": 2 * max(batches), "max_new_tokens": options.max_new_tokens, "lookahead": options.most}
    )
    config = BenchmarkConfig.model_validate({
        **config.model_dump(), "loads": tuple(batches), "max_lookahead": options.most,
    })  # fmt: skip
    setup, under = prepare(options, draft, config)
    sizes = {batch: sizes_at(batch, config) for batch in batches}
    setup.decode(setup.calibration[: max(batches)], setup.most)  # warms up
    calibration = {batch: Ways(calibrating(batch, setup.most, sizes[batch]), []) for batch in batches}
    walks = walked(setup)
    first = costs_of(taking_turns(setup, calibration, 1, groups=1)[0])
    ways = {
        batch: each._replace(
            measured=[*range(setup.most + 1), *chosen(first, walks[1], batch, sizes[batch])]
        )
        for batch, each in calibration.items()
    }  # fmt: skip
    fitted, measured = taking_turns(setup, ways, options.repeats)
    predictions = Predictions(costs_of(fitted), *walks)
    loads = [load_of(predictions, ways[batch], measured, batch) for batch in batches]
    for load in loads:
        Console().print(shown(load))
    return TreesResult(
        commit=commit, date=time.strftime("%Y-%m-%d"), hardware=hardware(), clock=options.clock,
        repeats=options.repeats, conditions=under, loads=tuple(loads), wall_s=time.perf_counter() - begun,
    )  # fmt: skip


def shown(load: MeasuredLoad) -> Table:
    """For people."""
    table = Table(title=f"{load.batch} texts at once: {load.better}, {load.better_against_best_chain:+.1%}")
    for name in ("shape", "tokens per step", "predicted tokens/s", "measured", "error"):
        table.add_column(name, justify="right")
    for row in (*load.chains, *load.trees):
        table.add_row(
            row.shape, f"{row.tokens_per_step:.2f}", f"{row.predicted:.1f}", f"{row.measured:.1f}", f"{row.error:+.1%}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--draft", type=Path, help="exported draft for its target; default: one is trained")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--most", type=int, default=5, help="largest lookahead, and depth of trees")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="draftsmith-trees-") as name:
        result = measure(options, options.draft or trained_export(Path(name) / "run", options.recipe, []))
    path = RESULTS / f"trees-{options.recipe.stem}.json"
    write_atomically(path, result)
    print(f"{result.wall_s:.0f} s: {path}")


if __name__ == "__main__":
    run_main(main)
