"""What `draftsmith bench` measures: real decoding of suites, by source, shape of proposals, temperature and batch size.

Acceptance is counted over all prompts of a suite; speed on the first ones, several times over after a warm-up, beside
the target alone in the same loop and at the same batch size. `ServedHarness` measures the drafts in SGLang, on the same
suites, for the same table. Runs in the process of `models.benchmark.standalone`.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from infra.records.acceptance import Conditions, Ground, LosslessRecord
from infra.refusal import Refusal
from infra.sglang.client import SGLangClient
from models.benchmark.bootstrap import length_interval
from models.benchmark.categories import suite_result
from models.benchmark.contestants import Contestants
from models.benchmark.engine_counts import ServedText
from models.benchmark.harness_result import LEAST_DISTINCT, Cell, Speed
from models.benchmark.reference import TOLERANCE
from models.benchmark.served import Setup, ask_all, counts_of
from models.data.prompts import SuitePrompts
from models.decoding.acceptance import by_position, distinct_token_share
from models.decoding.lossless import LosslessCheck, compare_texts, total
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.speculative import Decoded, Shape, speculate_together
from models.decoding.stopwatch import Stopwatch
from models.drafts.batched_proposer import ProposalSource
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import DynamicTree, parse_shape
from models.progress_bars import Bar, bars
from models.targets.model import eos_ids

RESAMPLES = 10_000


@dataclass(frozen=True)
class Repeat:
    """One timed pass."""

    tokens_per_s: float
    length: float
    """Acceptance length of the texts that were timed."""


Speeds = dict[int, list[Repeat]]
"""Speeds by batch size."""


class Watched(NamedTuple):
    """A suite in a server with a draft."""

    decoded: list[Decoded]
    speeds: Speeds


TimePass = Callable[[Sequence[list[int]], int, int], Repeat]
"""Decodes prompts, as many at a time as the second argument says; the third is the number of the repeat."""


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


def shape_of(text: str) -> Shape:
    """`4` or a tree; raises Refusal for anything else."""
    if not text.isdigit():
        return parse_shape(text)
    if not 1 <= int(text) <= 16:
        raise Refusal(f"lookahead {text}: give numbers from 1 to 16 with commas, for instance 3,5")
    return int(text)


def topk_of(shape: Shape) -> int:
    """The most children of a place, as conditions say it."""
    if isinstance(shape, int):
        return 1
    if isinstance(shape, DynamicTree):
        return shape.topk
    return max(children for depth in range(shape.depth) for children in shape.parents_at(depth).values())


class Cells:
    """What comes of decoded texts and timed passes, whoever decoded them."""

    def __init__(self, plan: HarnessPlan, under: Mapping[tuple[str, str], Conditions]):
        """`under`: conditions by suite and source."""
        self.plan, self.under = plan, under

    def cell(
        self,
        place: Place,
        decoded: Sequence[Decoded],
        plain: Speeds,
        speeds: Speeds,
        compared: LosslessRecord | None,
    ) -> Cell:
        """What comes of all texts of a suite. `compared`: greedy ones with the target's own text."""
        suite, temperature = place.suite, place.temperature
        prompts, shape = self.plan.suites[suite], shape_of(place.shape)
        shares = [distinct_token_share([each.tokens]) for each in decoded]
        varied = [row for row, share in enumerate(shares) if share >= LEAST_DISTINCT]
        others = [row for row, share in enumerate(shares) if share < LEAST_DISTINCT]
        shown = _ground(suite, prompts, decoded, varied)
        figures = suite_result(shown, 1.0)
        rows = np.array(shown.challenger, dtype=np.int64).reshape(-1, 2)
        chain = [decoded[row].counts for row in varied] if isinstance(shape, int) else []
        depth = shape if isinstance(shape, int) else shape.depth
        at = {"temperature": temperature, "sampled_temperature": temperature, "lookahead": depth}
        under = self.under[suite, place.source]
        proposals = "drawn" if temperature and under.draft != "none" else "greedy"
        conditions = under.model_copy(
            update={**at, "topk": topk_of(shape), "concurrency": self.plan.together, "proposals": proposals}
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
            speeds=tuple(speed(batch, plain[batch], repeats) for batch, repeats in speeds.items()),
        )

    def speeds(self, suite: str, what: str, time_pass: TimePass, bar: Bar, *, warm: int | None = None) -> Speeds:
        """Every repeat at every batch size; a pass over the first `warm` prompts (None: a batch) is not counted."""
        plan, found = self.plan, Speeds()
        for batch in plan.batches:
            prompts, advance = plan.timed(suite, batch), bar(f"{suite}, {what}, batch {batch}", plan.repeats)
            time_pass(prompts[: warm or batch], batch, 0)
            found[batch] = []
            for repeat in range(plan.repeats):
                found[batch].append(time_pass(prompts, batch, repeat))
                advance(1)
        return found


class Harness(Cells):
    """Measures every cell of a plan with one target, by the reference decoder."""

    def __init__(
        self,
        loaded: Contestants,
        sources: Mapping[str, ProposalSource],
        plan: HarnessPlan,
        under: Mapping[tuple[str, str], Conditions],
    ):
        """`sources` by the name that is written down; `under`: conditions by suite and source."""
        super().__init__(plan, under)
        self.loaded, self.sources = loaded, sources
        self._alone: dict[tuple[str, float], Speeds] = {}
        self._own: dict[str, list[Decoded]] = {}

    def measure(self) -> list[Cell]:
        """Measure every cell, in the plan's order."""
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
        alone = (suite, temperature)
        if alone not in self._alone:
            time_alone = self._time_pass(PromptLookup(), 0, temperature)
            self._alone[alone] = self.speeds(suite, f"target alone, T={temperature:g}", time_alone, bar)
        decoded = self._decode(suite, source, shape, temperature)
        what = f"{place.source} {place.shape}, T={temperature:g}"
        speeds = self.speeds(suite, what, self._time_pass(source, shape, temperature), bar)
        compared = self._compare(suite, decoded) if temperature == 0 else None
        return self.cell(place, decoded, self._alone[alone], speeds, compared)

    def _decode(self, suite: str, source: ProposalSource, shape: Shape, temperature: float) -> list[Decoded]:
        """All prompts of a suite, some at a time."""
        prompts, together, loaded = self.plan.suites[suite].prompts, self.plan.together, self.loaded
        decode = partial(
            speculate_together, loaded.target, source, shape=shape, max_new_tokens=self.plan.max_new_tokens,
            eos_ids=loaded.eos_ids, sampling=self._sampling(temperature, 0),
        )  # fmt: skip
        groups = [prompts[first : first + together] for first in range(0, len(prompts), together)]
        return [decoded for group in groups for decoded in decode(group)]

    def _compare(self, suite: str, decoded: Sequence[Decoded]) -> LosslessRecord:
        check = LosslessCheck(self.loaded.target, self.loaded.exact, self.plan.max_new_tokens, self.loaded.eos_ids)
        pairs = zip(self.plan.suites[suite].prompts, decoded, self.own(suite), strict=True)
        return total(check.compare(prompt, each.tokens, alone.tokens) for prompt, each, alone in pairs)

    def _time_pass(self, source: ProposalSource, shape: Shape, temperature: float) -> TimePass:
        """Time passes after the prefill."""

        def time_pass(prompts: Sequence[list[int]], batch: int, repeat: int) -> Repeat:
            watch, target = Stopwatch(self.loaded.target.device), self.loaded.target
            sampling, counts = self._sampling(temperature, repeat), []
            for first in range(0, len(prompts), batch):
                some = prompts[first : first + batch]
                # No text ends early, so that a batch stays whole.
                decoded = speculate_together(
                    target, source, some, shape, self.plan.max_new_tokens, frozenset(), sampling=sampling, watch=watch
                )
                counts += [each.counts for each in decoded]
            seconds = sum(sum(step.seconds.values()) for step in watch.steps)
            length = sum(each.tokens for each in counts) / max(1, sum(each.steps for each in counts))
            return Repeat(sum(step.emitted for step in watch.steps) / seconds, length)

        return time_pass

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


class ServedHarness(Cells):
    """Measures every chain of a plan in SGLang, for every draft, greedily, without the reference decoder.

    One server for each draft and lookahead, then one for the target alone, whose text theirs must equal.
    """

    def __init__(
        self,
        setup: Setup,
        drafts: Mapping[str, Path],
        plan: HarnessPlan,
        under: Mapping[tuple[str, str], Conditions],
    ):
        """`drafts`: exports by the name that is written down; the engine can serve all of them."""
        super().__init__(plan, under)
        self.setup, self.drafts = setup, drafts

    def measure(self) -> list[Cell]:
        """Measure every cell. Raises Refusal for what a person has to correct."""
        chains, watched = [shape for shape in self.plan.shapes if shape.isdigit()], dict[Place, Watched]()
        with bars() as bar:
            for name, draft in self.drafts.items():
                for shape in chains:
                    with self.setup.serving(draft, int(shape)) as client:
                        for suite in self.plan.suites:
                            watched[Place(suite, 0.0, name, shape)] = self._watched(client, suite, name, shape, bar)
            with self.setup.serving(None, 0) as client:
                own = ServedText(client, self.setup, eos_ids(self.setup.target))
                return [cell for suite in self.plan.suites for cell in self._cells(own, suite, watched, bar)]

    def _watched(self, client: SGLangClient, suite: str, name: str, shape: str, bar: Bar) -> Watched:
        prompts = self.plan.suites[suite].prompts
        seen = bar(f"{suite}, {name} in SGLang, step by step", len(prompts))
        answers = self.setup.watch_all(client, prompts, lambda _: seen(1))
        decoded = [Decoded(tuple(answer.tokens), counts_of(answer, int(shape))) for answer in answers]
        return Watched(decoded, self._speeds(client, suite, name, bar))

    def _cells(self, own: ServedText, suite: str, watched: Mapping[Place, Watched], bar: Bar) -> Iterator[Cell]:
        """The suite's cells, once the target alone has written its texts."""
        prompts, ask = self.plan.suites[suite].prompts, partial(own.client.generate, sampling=self.setup.greedy)
        answered = bar(f"{suite}, target alone in SGLang", len(prompts))
        texts = [answer.tokens for answer in ask_all(ask, prompts, self.plan.together, lambda _: answered(1))]
        plain = self._speeds(own.client, suite, "target alone", bar)
        for place, found in watched.items():
            if place.suite == suite:
                pairs = zip(prompts, found.decoded, texts, strict=True)
                compared = total(compare_texts(own, prompt, each.tokens, text) for prompt, each, text in pairs)
                yield self.cell(place, found.decoded, plain, found.speeds, compared)

    def _speeds(self, client: SGLangClient, suite: str, name: str, bar: Bar) -> Speeds:
        # No text ends early, so that as many requests run all the time.
        ask = partial(client.generate, sampling=self.setup.greedy | {"ignore_eos": True})

        def time_pass(prompts: Sequence[list[int]], batch: int, repeat: int) -> Repeat:
            begun = time.perf_counter()
            answers = ask_all(ask, prompts, batch)
            seconds, tokens = time.perf_counter() - begun, sum(len(answer.tokens) for answer in answers)
            steps = sum(answer.meta.get("spec_verify_ct", len(answer.tokens) - 1) for answer in answers)
            return Repeat(tokens / seconds, (tokens - len(answers)) / max(1, steps))

        # The warm-up leaves all prompts in the engine's cache.
        every = max((len(self.plan.timed(suite, batch)) for batch in self.plan.batches), default=None)
        return self.speeds(suite, f"{name} in SGLang", time_pass, bar, warm=every)
