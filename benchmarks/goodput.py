"""Is predicted goodput what is measured, and does the online policy beat every fixed lookahead?

    python benchmarks/goodput.py [RECIPE] [--draft EXPORT] [--batches 1,4,16] [--most 4] [--repeats 2] [--clock cpu]

The reference decoder on the recipe's target, with a draft that is trained here unless one is given, and with prompt
lookup, whose proposals cost next to nothing. First the steps of some prompts are timed, and acceptance is counted: the
cost model is fitted to them; what realigning the texts of a batch costs is seen there too. Then, on other prompts: (a)
the throughput of every lookahead at every batch size, against the one that the model predicts to be best; (b) a load
that rises and falls (a batch size per phase), decoded with every fixed lookahead and with the policy that
chooses in every step. Every repetition decodes the same texts in all ways in turn; a figure is the median of
repetitions.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from machine import cpu_model
from online_policy import AdaptiveText, LookaheadPolicy
from prepared import trained_export
from rich.console import Console
from rich.table import Table
from sources import numbers

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha
from infra.records.acceptance import Conditions
from infra.records.data_path import Record
from infra.records.goodput import GoodputTable, StepTime
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import load_contestants
from models.config.benchmark import BenchmarkConfig
from models.config.recipe import load_recipe
from models.data.conversations import source_hash
from models.data.prompts import read_prompts
from models.decoding.acceptance import AcceptedCounts, by_position
from models.decoding.goodput import FittedCosts, fit, goodput_table
from models.decoding.plain import Prefill, prefill
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.speculative import Conversation, Shape, decode_together
from models.decoding.stopwatch import StepSeconds, Stopwatch
from models.drafts.batched_proposer import ProposalSource
from models.drafts.sampling import GREEDY
from models.targets.model import TargetModel
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PHASES = (1, 2, 4, 8, 16, 8, 4, 2, 1)
MEASURED_TEXTS = 8
"""At each batch size in (a), at least: texts differ in what they accept."""
LEAST_TEXTS = 2
"""Of a phase, one group after the other: few texts at once take no shorter part of the time than many."""
POLICY = "policy"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Measured(Record):
    """(a): one batch size."""

    batch: int
    tokens_per_s: dict[int, float]
    """By lookahead."""
    predicted_best: int
    shortfall: float
    """How much slower the predicted best is than the best measured one, relatively."""


class StepParts(Record):
    """Where the time of a step goes while all texts of a batch are still going."""

    batch: int
    lookahead: int
    seconds: dict[str, float]
    """Median by part: see `models.decoding.stopwatch`."""
    realign_share: float


class SourceResult(Record):
    """One source of proposals."""

    parts: tuple[StepParts, ...]
    """Of the steps that the cost model is fitted to."""
    predicted: GoodputTable
    measured: tuple[Measured, ...]
    tokens: int
    """Of all phases."""
    under_load: dict[str, float]
    """(b): tokens per second by fixed lookahead, and of the policy."""
    policy_lookaheads: dict[int, float]
    """Mean lookahead that the policy chose, by texts at once at the beginning of a phase."""


class GoodputResult(Record):
    """What is committed."""

    commit: str
    date: str
    cpu: str
    clock: str
    """`cpu`: seconds of this process on one thread, so that what else the machine does is left out."""
    repeats: int
    conditions: Conditions
    phases: tuple[int, ...]
    sources: dict[str, SourceResult]
    wall_s: float


@dataclass(frozen=True)
class Setup:
    """All that is decoded with, and how it is timed."""

    target: TargetModel
    source: ProposalSource
    calibration: list[Prefill]
    prompts: list[Prefill]
    """Read once; every decoding gets copies of the caches, which it uses up."""
    most: int
    new_tokens: int
    clock: Callable[[], float]

    def decode(
        self, prompts: Sequence[Prefill], lookahead: Shape | LookaheadPolicy, watch: Stopwatch | None = None
    ) -> tuple[float, list[Conversation]]:
        """Seconds after the prefills; no text ends early."""
        prompts = [replace(prompt, cache=deepcopy(prompt.cache)) for prompt in prompts]
        begun, never = self.clock(), frozenset[int]()
        adaptive = isinstance(lookahead, LookaheadPolicy)
        begin = partial(AdaptiveText, lookahead) if adaptive else partial(Conversation, shape=lookahead)
        texts = [
            begin(self.target, self.source, prompt, max_new_tokens=self.new_tokens, eos_ids=never, sampling=GREEDY)
            for prompt in prompts
        ]
        decode_together(texts, watch=watch, choose=lookahead.step if adaptive else None)
        return self.clock() - begun, texts


def calibrate(
    setup: Setup, batches: Sequence[int], repeats: int
) -> tuple[FittedCosts, list[float], tuple[StepParts, ...]]:
    """The cost model, acceptance by position, and parts of the steps in which all texts were still going."""
    steps: list[StepSeconds] = []
    counted: list[AcceptedCounts] = []
    setup.decode(setup.calibration[: max(batches)], setup.most)  # warms up
    for _ in range(repeats):
        for batch in batches:
            for lookahead in sorted({0, 1, setup.most // 2, setup.most}):
                watch = Stopwatch(setup.target.device, clock=setup.clock)
                _, texts = setup.decode(setup.calibration[:batch], lookahead, watch)
                steps += [each for each in watch.steps if (each.texts, each.tokens) == (batch, lookahead + 1)]
                counted += [text.decoded().counts for text in texts] if lookahead == setup.most else []
    verifying = [(step.texts, step.tokens, sum(step.seconds.values()) - step.seconds["draft"]) for step in steps]
    drafting = [(step.texts, step.tokens - 1, step.seconds["draft"]) for step in steps if step.tokens > 1]
    rates = [rate or 0.0 for rate in by_position(counted, setup.most)]
    return FittedCosts(fit(medians(verifying)), fit(medians(drafting))), rates, step_parts(steps)


def step_parts(steps: Sequence[StepSeconds]) -> tuple[StepParts, ...]:
    """One for each batch and lookahead."""
    found = []
    for batch, tokens in sorted({(step.texts, step.tokens) for step in steps}):
        alike = [step.seconds for step in steps if (step.texts, step.tokens) == (batch, tokens)]
        seconds = {part: statistics.median(each[part] for each in alike) for part in alike[0]}
        share = seconds["realign"] / sum(seconds.values())
        found.append(StepParts(batch=batch, lookahead=tokens - 1, seconds=seconds, realign_share=share))
    return tuple(found)


def medians(times: Sequence[tuple[int, int, float]]) -> list[StepTime]:
    """One step time for each number of texts and of tokens."""
    found: dict[tuple[int, int], list[float]] = {}
    for batch, tokens, seconds in times:
        found.setdefault((batch, tokens), []).append(seconds)
    return [StepTime(batch=of[0], tokens=of[1], seconds=statistics.median(each)) for of, each in found.items()]


def measure_batches(
    setup: Setup, batches: Sequence[int], predicted: GoodputTable, repeats: int
) -> tuple[Measured, ...]:
    """(a): every lookahead at every batch size."""
    speeds: dict[tuple[int, int], list[float]] = {}
    for _ in range(repeats):
        for batch in batches:
            groups = [setup.prompts[first : first + batch] for first in range(0, max(MEASURED_TEXTS, batch), batch)]
            for lookahead in range(setup.most + 1):
                seconds = sum(setup.decode(group, lookahead)[0] for group in groups)
                tokens = sum(map(len, groups)) * (setup.new_tokens - 1)
                speeds.setdefault((batch, lookahead), []).append(tokens / seconds)
    found = []
    for batch in batches:
        at = {lookahead: statistics.median(speeds[batch, lookahead]) for lookahead in range(setup.most + 1)}
        best = predicted.best[batch]
        shortfall = 1 - at[best] / max(at.values())
        found.append(Measured(batch=batch, tokens_per_s=at, predicted_best=best, shortfall=shortfall))
    return tuple(found)


def measure_load(
    setup: Setup, costs: FittedCosts, rates: Sequence[float], repeats: int
) -> tuple[dict[str, float], int, dict[int, float]]:
    """(b): tokens per second of every contender, the tokens of all phases, and what the policy chose."""
    groups = [
        setup.prompts[first : first + load] for load in PHASES for first in range(0, max(LEAST_TEXTS, load), load)
    ]
    tokens = sum(map(len, groups)) * (setup.new_tokens - 1)
    speeds: dict[str, list[float]] = {}
    chosen: dict[int, list[int]] = {}
    for _ in range(repeats):
        contenders: dict[str, int | LookaheadPolicy] = {str(at): at for at in range(setup.most + 1)}
        contenders[POLICY] = LookaheadPolicy(costs, rates)
        seconds = dict.fromkeys(contenders, 0.0)
        # Contenders take turns in every group, so that a disturbance of the machine meets all of them.
        for group in groups:
            for name, lookahead in contenders.items():
                spent, texts = setup.decode(group, lookahead)
                seconds[name] += spent
                adaptive = [text for text in texts if isinstance(text, AdaptiveText)]
                chosen.setdefault(len(group), []).extend(at for text in adaptive for at in text.lookaheads)
        for name, spent in seconds.items():
            speeds.setdefault(name, []).append(tokens / spent)
    under_load = {name: statistics.median(of) for name, of in speeds.items()}
    return under_load, tokens, {load: statistics.fmean(of) for load, of in sorted(chosen.items())}


def shown(found: GoodputTable) -> Table:
    """Tokens per second, one row per batch, one column per lookahead; the best of each row is marked."""
    table = Table(title="Predicted tokens/s by lookahead")
    table.add_column("texts at once", justify="right")
    for lookahead in sorted({row.lookahead for row in found.rows}):
        table.add_column(str(lookahead), justify="right")
    for batch, best in found.best.items():
        row = {each.lookahead: each.tokens_per_s for each in found.rows if each.batch == batch}
        table.add_row(str(batch), *(f"{'*' if at == best else ''}{row[at]:.1f}" for at in sorted(row)))
    return table


def measure(options: argparse.Namespace, draft: Path) -> GoodputResult:
    """Calibrate on some prompts, measure on others."""
    begun, commit = time.perf_counter(), git_sha()
    batches, recipe = numbers(options.batches, "--batches", 1), load_recipe(options.recipe)
    needed = max(*batches, *PHASES)
    config = recipe.benchmark.model_copy(
        update={"prompts": 2 * needed, "max_new_tokens": options.max_new_tokens, "lookahead": options.most}
    )
    setup, under = prepare(options, draft, config)
    if len(setup.prompts) < needed:
        raise ValueError(f"{len(setup.prompts)} prompts: {needed} are decoded at once, lower --batches")
    sources: dict[str, ProposalSource] = {"draft": setup.source, "prompt lookup": PromptLookup()}
    found = {name: one_source(replace(setup, source=each), batches, options.repeats) for name, each in sources.items()}
    return GoodputResult(
        commit=commit, date=time.strftime("%Y-%m-%d"), cpu=cpu_model(), clock=options.clock, repeats=options.repeats,
        conditions=under, phases=PHASES, sources=found, wall_s=time.perf_counter() - begun,
    )  # fmt: skip


def one_source(setup: Setup, batches: Sequence[int], repeats: int) -> SourceResult:
    """The cost model, (a) and (b)."""
    costs, rates, parts = calibrate(setup, batches, repeats)
    predicted = goodput_table(costs, rates, sorted({*batches, *PHASES}))
    Console().print(shown(predicted))
    measured = measure_batches(setup, batches, predicted, repeats)
    under_load, tokens, chosen = measure_load(setup, costs, rates, repeats)
    return SourceResult(
        parts=parts, predicted=predicted, measured=measured, tokens=tokens, under_load=under_load,
        policy_lookaheads=chosen,
    )  # fmt: skip


def prepare(options: argparse.Namespace, draft: Path, config: BenchmarkConfig) -> tuple[Setup, Conditions]:
    """Target, draft, and two halves of prompts."""
    recipe = load_recipe(options.recipe)
    target = prepare_target(recipe.target)
    prompts, template_hash = read_prompts(recipe.data.source, target, config, "none", recipe.target.add_bos)
    loaded = load_contestants(Path(target.path), [draft], torch.float32)
    read = [prefill(loaded.target, prompt) for prompt in prompts]
    setup = Setup(
        loaded.target, loaded.drafts[0], read[::2], read[1::2], options.most, options.max_new_tokens,
        CLOCKS[options.clock],
    )  # fmt: skip
    under = conditions(
        config, Counter.reference(loaded.target), target=target, draft=draft,
        dataset_hash=source_hash(recipe.data.source), template_hash=template_hash, prompts=len(prompts),
    )  # fmt: skip
    return setup, under.model_copy(update={"concurrency": max(PHASES)})


def tables(result: SourceResult) -> list[Table]:
    """(a) and (b) for people."""
    measured = Table(title="Measured tokens/s by lookahead (* predicted as best)")
    measured.add_column("texts at once", justify="right")
    for at in result.measured[0].tokens_per_s:
        measured.add_column(str(at), justify="right")
    measured.add_column("shortfall", justify="right")
    for row in result.measured:
        cells = [f"{'*' if at == row.predicted_best else ''}{speed:.0f}" for at, speed in row.tokens_per_s.items()]
        measured.add_row(str(row.batch), *cells, f"{row.shortfall:.1%}")
    load = Table(title="Tokens/s under a load that rises and falls")
    for name in result.under_load:
        load.add_column(name, justify="right")
    load.add_row(*(f"{speed:.0f}" for speed in result.under_load.values()))
    return [measured, load]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--draft", type=Path, help="exported draft for its target; default: one is trained")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--most", type=int, default=4, help="largest lookahead")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="draftsmith-goodput-") as name:
        result = measure(options, options.draft or trained_export(Path(name) / "run", options.recipe, []))
    path = RESULTS / f"goodput-{options.recipe.stem}.json"
    write_atomically(path, result)
    for name, found in result.sources.items():
        print(f"{name}: the policy's mean lookahead by texts at once", found.policy_lookaheads)
        shares = [part.realign_share for part in found.parts]
        print(f"{name}: realignment takes {min(shares):.1%} to {max(shares):.1%} of a step")
        for table in tables(found):
            Console().print(table)
    print(f"{result.wall_s:.0f} s: {path}")


if __name__ == "__main__":
    run_main(main)
