"""What `draftsmith bench` measures: real decoding of suites, by source, shape of proposals, temperature and batch size.

Acceptance is counted over all prompts of a suite; speed on the first ones, several times over after a warm-up, beside
the target alone in the same loop and at the same batch size. Runs in the process of `models.benchmark.standalone`.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from infra.records.acceptance import Conditions, Ground, GroupAcceptance, LosslessRecord
from infra.records.data_path import Record
from infra.refusal import Refusal
from models.benchmark.bootstrap import length_interval
from models.benchmark.categories import suite_result
from models.benchmark.contestants import Contestants
from models.benchmark.reference import TOLERANCE
from models.data.prompts import SuitePrompts
from models.decoding.acceptance import by_position, distinct_token_share
from models.decoding.lossless import LosslessCheck, total
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.speculative import Decoded, speculate_together
from models.decoding.stopwatch import Stopwatch
from models.drafts.batched_proposer import ProposalSource
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import DynamicTree, TreeShape, parse_shape
from models.progress_bars import Bar, bars

LEAST_DISTINCT = 0.3
"""Minimum share of distinct tokens; a more repetitive text is reported separately."""
RESAMPLES = 10_000


class Speed(Record):
    """Decoding after the prefill at one batch size: medians over the repeats, with the slowest and fastest."""

    batch: int
    repeats: int
    acceptance_length: float
    """Acceptance length of the timed texts."""
    plain_tokens_per_s: float
    """The target alone, in the same loop."""
    plain_spread: tuple[float, float]
    tokens_per_s: float | None
    """None if the figure is impossible and therefore not published."""
    spread: tuple[float, float] | None
    speedup: float | None
    flagged: bool
    """The speed-up exceeded what the acceptance length allows."""


class Cell(Record):
    """One source with one shape of proposals at one temperature on one suite, and under what conditions."""

    suite: str
    source: str
    shape: str
    """A lookahead, or a tree as on the command line."""
    conditions: Conditions
    length: float | None
    """Acceptance length over texts that are not repetitive; None without a complete step."""
    interval: tuple[float, float] | None
    """95 %, by bootstrap over conversations."""
    steps: int
    conversations: int
    by_position: tuple[float | None, ...]
    """Acceptance by position of a chain."""
    by_category: tuple[GroupAcceptance, ...]
    by_context: tuple[GroupAcceptance, ...]
    distinct_token_share: float
    """Share of distinct tokens over all texts."""
    repetitive: GroupAcceptance | None
    """Texts with a distinct-token share under `LEAST_DISTINCT`, which are in no other figure."""
    mismatches: int | None
    """Mismatches of greedy text with the target's own; None if sampled."""
    ties: int | None
    speeds: tuple[Speed, ...]


class HarnessResult(Record):
    """What `draftsmith bench` writes."""

    commit: str
    date: str
    too_long: Mapping[str, int]
    """Questions left out because of their length, by suite."""
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    """What was asked for and not measured, and why."""
    wall_s: float


@dataclass(frozen=True)
class Repeat:
    """One timed pass."""

    tokens_per_s: float
    length: float
    """Acceptance length of the texts that were timed."""


Speeds = Mapping[int, Sequence[Repeat]]
"""Speeds by batch size."""


class Place(NamedTuple):
    """Which cell of the table."""

    suite: str
    temperature: float
    source: str
    shape: str


@dataclass(frozen=True)
class HarnessPlan:
    """What is measured."""

    suites: Mapping[str, SuitePrompts]
    shapes: tuple[str, ...]
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    """Batch sizes of the speed measurements."""
    repeats: int
    timed_prompts: int
    max_new_tokens: int
    seed: int

    @property
    def together(self) -> int:
        """Texts decoded at once where acceptance is counted."""
        return max((*self.batches, 1))

    def timed(self, suite: str, batch: int) -> list[list[int]]:
        """Prompts of a repeat, whole batches of them; a suite with fewer than a batch is gone through again."""
        prompts, whole = self.suites[suite].prompts, max(1, self.timed_prompts // batch) * batch
        return [prompts[row % len(prompts)] for row in range(whole)]


def shape_of(text: str) -> int | TreeShape:
    """`4` or a tree; raises Refusal for anything else."""
    if not text.isdigit():
        return parse_shape(text)
    if not 1 <= int(text) <= 16:
        raise Refusal(f"lookahead {text}: give numbers from 1 to 16 with commas, for instance 3,5")
    return int(text)


def topk_of(shape: int | TreeShape) -> int:
    """The most children of a place, as conditions say it."""
    if isinstance(shape, int):
        return 1
    if isinstance(shape, DynamicTree):
        return shape.topk
    return max(children for depth in range(shape.depth) for children in shape.parents_at(depth).values())


class Harness:
    """Measures every cell of a plan with one target."""

    def __init__(
        self,
        loaded: Contestants,
        sources: Mapping[str, ProposalSource],
        plan: HarnessPlan,
        under: Mapping[tuple[str, str], Conditions],
    ):
        """`sources` by the name that is written down; `under`: conditions by suite and source."""
        self.loaded, self.sources, self.plan, self.under = loaded, sources, plan, under
        self._alone: dict[tuple[str, float], Speeds] = {}
        self._own: dict[str, list[Decoded]] = {}

    def measure(self) -> list[Cell]:
        """Every cell, in the plan's order."""
        plan, found = self.plan, list[Cell]()
        todo = [
            Place(suite, temperature, name, shape)
            for suite in plan.suites
            for temperature in plan.temperatures
            for name in self.sources
            for shape in plan.shapes
            if shape.isdigit() or branches(self.sources[name])
        ]
        with bars() as bar:
            done = bar("cells", len(todo))
            for place in todo:
                found.append(self._measured(place, bar))
                done(1)
        return found

    def own(self, suite: str) -> list[Decoded]:
        """The target's own greedy text, by the same loop: a step without proposals is a step of plain decoding."""
        if suite not in self._own:
            self._own[suite] = self._decode(suite, PromptLookup(), 0, 0.0)
        return self._own[suite]

    def _measured(self, place: Place, bar: Bar) -> Cell:
        suite, temperature = place.suite, place.temperature
        source, shape = self.sources[place.source], shape_of(place.shape)
        if (suite, temperature) not in self._alone:
            self._alone[suite, temperature] = self._speeds(suite, PromptLookup(), 0, temperature, bar)
        decoded = self._decode(suite, source, shape, temperature)
        measured, plain = self._speeds(suite, source, shape, temperature, bar), self._alone[suite, temperature]
        speeds = [speed(batch, plain[batch], repeats) for batch, repeats in measured.items()]
        return self.cell(place, decoded, speeds)

    def cell(
        self, place: Place, decoded: Sequence[Decoded], speeds: Sequence[Speed], engine: str = "transformers"
    ) -> Cell:
        """What comes of all texts of a suite; greedy ones are compared with the target's own."""
        suite, temperature = place.suite, place.temperature
        prompts, shape = self.plan.suites[suite], shape_of(place.shape)
        shares = [distinct_token_share([each.tokens]) for each in decoded]
        varied = [row for row, share in enumerate(shares) if share >= LEAST_DISTINCT]
        others = [row for row, share in enumerate(shares) if share < LEAST_DISTINCT]
        shown = _ground(suite, prompts, decoded, varied)
        figures = suite_result(shown, 1.0)
        rows = np.array(shown.challenger, dtype=np.int64).reshape(-1, 2)
        chain = [decoded[row].counts for row in varied] if isinstance(shape, int) else []
        compared = self._compare(suite, decoded) if temperature == 0 else None
        depth = shape if isinstance(shape, int) else shape.depth
        at = {"temperature": temperature, "sampled_temperature": temperature, "lookahead": depth}
        conditions = self.under[suite, place.source].model_copy(
            update={**at, "topk": topk_of(shape), "concurrency": self.plan.together, "engine": engine}
        )
        return Cell(
            suite=suite,
            source=place.source,
            shape=place.shape,
            conditions=conditions,
            length=figures.whole.length,
            interval=length_interval(rows, RESAMPLES, 0) if figures.whole.steps else None,
            steps=figures.whole.steps,
            conversations=len(varied),
            by_position=by_position(chain, depth) if chain else (),
            by_category=figures.by_category,
            by_context=figures.by_context,
            distinct_token_share=sum(shares) / len(shares),
            repetitive=suite_result(_ground(suite, prompts, decoded, others), 1.0).whole if others else None,
            mismatches=compared and compared.mismatches,
            ties=compared and compared.ties,
            speeds=tuple(speeds),
        )

    def _decode(self, suite: str, source: ProposalSource, shape: int | TreeShape, temperature: float) -> list[Decoded]:
        """All prompts of a suite, some at a time."""
        prompts, together = self.plan.suites[suite].prompts, self.plan.together
        sampling = self._sampling(temperature, 0)
        found: list[Decoded] = []
        for first in range(0, len(prompts), together):
            found += speculate_together(
                self.loaded.target, source, prompts[first : first + together], shape, self.plan.max_new_tokens,
                self.loaded.eos_ids, sampling=sampling,
            )  # fmt: skip
        return found

    def _compare(self, suite: str, decoded: Sequence[Decoded]) -> LosslessRecord:
        check = LosslessCheck(self.loaded.target, self.loaded.exact, self.plan.max_new_tokens, self.loaded.eos_ids)
        pairs = zip(self.plan.suites[suite].prompts, decoded, self.own(suite), strict=True)
        return total([check.compare(prompt, each.tokens, alone.tokens) for prompt, each, alone in pairs])

    def _speeds(
        self, suite: str, source: ProposalSource, shape: int | TreeShape, temperature: float, bar: Bar
    ) -> Speeds:
        """Every repeat; the pass that warms up is not counted."""
        plan, found = self.plan, dict[int, list[Repeat]]()
        for batch in plan.batches:
            advance = bar(f"{suite}, batch {batch}, T={temperature:g}", plan.repeats)
            timed = plan.timed(suite, batch)
            self._timed(timed[:batch], batch, source, shape, self._sampling(temperature, 0))
            found[batch] = []
            for repeat in range(plan.repeats):
                found[batch].append(self._timed(timed, batch, source, shape, self._sampling(temperature, repeat)))
                advance(1)
        return found

    def _timed(
        self,
        prompts: Sequence[list[int]],
        batch: int,
        source: ProposalSource,
        shape: int | TreeShape,
        sampling: Sampling,
    ) -> Repeat:
        """After the prefill."""
        watch, target = Stopwatch(self.loaded.target.device), self.loaded.target
        tokens = steps = 0
        for first in range(0, len(prompts), batch):
            some = prompts[first : first + batch]
            # No text ends early, so that a batch stays whole.
            decoded = speculate_together(
                target, source, some, shape, self.plan.max_new_tokens, frozenset(), sampling=sampling, watch=watch
            )
            tokens += sum(each.counts.tokens for each in decoded)
            steps += sum(each.counts.steps for each in decoded)
        seconds = sum(sum(step.seconds.values()) for step in watch.steps)
        return Repeat(sum(step.emitted for step in watch.steps) / seconds, tokens / max(1, steps))

    def _sampling(self, temperature: float, repeat: int) -> Sampling:
        if not temperature:
            return GREEDY
        generator = torch.Generator(self.loaded.target.device).manual_seed(self.plan.seed + repeat)
        return Sampling(temperature, 1.0, generator)


def branches(source: ProposalSource) -> bool:
    """Whether a source proposes trees."""
    return source.proposers(1).branches


def speed(batch: int, plain: Sequence[Repeat], repeats: Sequence[Repeat]) -> Speed:
    """Judge the repeats of one batch size against those of the target alone."""
    alone, together = ([each.tokens_per_s for each in of] for of in (plain, repeats))
    speedup = statistics.median(together) / statistics.median(alone)
    length = statistics.fmean(each.length for each in repeats)
    possible = speedup <= TOLERANCE * length
    return Speed(
        batch=batch,
        repeats=len(repeats),
        acceptance_length=length,
        plain_tokens_per_s=statistics.median(alone),
        plain_spread=(min(alone), max(alone)),
        tokens_per_s=statistics.median(together) if possible else None,
        spread=(min(together), max(together)) if possible else None,
        speedup=speedup if possible else None,
        flagged=not possible,
    )


def _ground(name: str, prompts: SuitePrompts, decoded: Sequence[Decoded], rows: Sequence[int]) -> Ground:
    return Ground(
        name=name,
        dataset_hash=prompts.dataset_hash,
        margin=0.0,
        challenger=tuple((decoded[row].counts.tokens, decoded[row].counts.steps) for row in rows),
        champion=None,
        categories=tuple(prompts.categories[row] for row in rows) if prompts.categories else (),
        contexts=tuple(len(prompts.prompts[row]) for row in rows),
    )
