"""What `draftsmith bench` measures: acceptance and speed by suite, source, shape of proposals and temperature.

Acceptance of chains comes from walks over the target's own text, all sources and lookaheads at once; the first prompts
are decoded for real, and their texts and counts compared. Trees are decoded for real. Speed is measured apart, on the
first suite at the first temperature, several times over after a warm-up, beside the target alone in the same loop and
at the same batch size. `models.benchmark.served_harness` measures the drafts in SGLang, for the same table. Runs in the
process of `models.benchmark.standalone`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from infra.records.acceptance import Conditions, Ground, LosslessRecord
from infra.refusal import Refusal
from models.benchmark.categories import suite_result
from models.benchmark.conditions import sampled_law
from models.benchmark.contestants import Contestants
from models.benchmark.harness_result import LEAST_DISTINCT, Cell, Speed
from models.benchmark.measure import WalkedTexts, walk_decoded, walk_texts
from models.benchmark.paired import length_interval
from models.benchmark.reference import TOLERANCE
from models.config.benchmark import BenchmarkConfig
from models.data.prompts import SuitePrompts
from models.decoding.acceptance import Counts, by_position, distinct_token_share
from models.decoding.lossless import LosslessCheck, total
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.speculative import Decoded, Shape, speculate_together
from models.decoding.stopwatch import Stopwatch
from models.drafts.batched_proposer import ProposalSource
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import parse_shape
from models.progress_bars import Bar, bars


@dataclass(frozen=True)
class Repeat:
    """One timed pass."""

    tokens_per_s: float
    length: float
    """Acceptance length of the texts that were timed."""


Speeds = dict[int, list[Repeat]]
"""Speeds by batch size."""


class Seen(NamedTuple):
    """One text and its verification steps, of real decoding or of a walk."""

    tokens: Sequence[int]
    counts: Counts


class Verified(NamedTuple):
    """Real decoding of a suite's first texts."""

    texts: int
    same_counts: int | None
    """Texts whose counts equal the walk's; None where there was no walk."""
    compared: LosslessRecord | None
    """Greedy texts with the target's own."""


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
    verified_prompts: int
    """Greedy texts of a chain, of each suite and source, that are decoded for real."""
    max_new_tokens: int
    seed: int

    @property
    def together(self) -> int:
        """Texts decoded at once where acceptance is counted by real decoding."""
        return max((*self.batches, 1))

    @property
    def chains(self) -> list[int]:
        """Lookaheads."""
        return [int(shape) for shape in self.shapes if shape.isdigit()]

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


class Cells:
    """What comes of decoded texts and timed passes, whoever decoded them."""

    def __init__(self, plan: HarnessPlan, under: Mapping[tuple[str, str], Conditions]):
        """`under`: conditions by suite and source."""
        self.plan, self.under = plan, under

    def cell(
        self,
        place: Place,
        decoded: Sequence[Seen | Decoded],
        verified: Verified,
        speeds: Sequence[Speed],
    ) -> Cell:
        """What comes of all texts of a suite."""
        suite, temperature = place.suite, place.temperature
        prompts, shape = self.plan.suites[suite], shape_of(place.shape)
        shares = [distinct_token_share([each.tokens]) for each in decoded]
        varied = [row for row, share in enumerate(shares) if share >= LEAST_DISTINCT]
        others = [row for row, share in enumerate(shares) if share < LEAST_DISTINCT]
        shown = _ground(suite, prompts, decoded, varied)
        figures = suite_result(shown, 1.0)
        rows = np.array(shown.challenger, dtype=np.float64).reshape(-1, 2)
        chain = [decoded[row].counts for row in varied] if isinstance(shape, int) else []
        depth, topk = (shape, 1) if isinstance(shape, int) else (shape.depth, shape.topk)
        at = {"temperature": temperature, "sampled_temperature": temperature, "lookahead": depth, "topk": topk}
        under = self.under[suite, place.source]
        proposals = "drawn" if temperature and under.draft != "none" and isinstance(shape, int) else "greedy"
        conditions = under.model_copy(update={**at, "concurrency": self.plan.together, "proposals": proposals})
        return Cell(
            suite=suite,
            source=place.source,
            shape=place.shape,
            conditions=conditions,
            length=figures.whole.length,
            interval=length_interval(rows) if figures.whole.steps else None,
            steps=figures.whole.steps,
            conversations=len(varied),
            by_position=by_position(chain, depth) if chain else (),
            by_category=figures.by_category,
            by_context=figures.by_context,
            distinct_token_share=sum(shares) / len(shares),
            repetitive=suite_result(_ground(suite, prompts, decoded, others), 1.0).whole if others else None,
            verified=verified.texts,
            same_counts=verified.same_counts,
            mismatches=verified.compared and verified.compared.mismatches,
            ties=verified.compared and verified.compared.ties,
            speeds=tuple(speeds),
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
        config: BenchmarkConfig,
        under: Mapping[tuple[str, str], Conditions],
    ):
        """`sources` by the name that is written down; `under`: conditions by suite and source."""
        super().__init__(plan, under)
        self.loaded, self.sources = loaded, sources
        # A walk costs the same for all lookaheads up to the largest.
        self.config = config.model_copy(update={"max_lookahead": max(plan.chains, default=1)})

    def measure(self) -> list[Cell]:
        """Measure every cell: suites in order, and in each temperatures, sources and shapes."""
        plan, found = self.plan, list[Cell]()
        shapes = {
            name: [shape for shape in plan.shapes if shape.isdigit() or branches(source)]
            for name, source in self.sources.items()
        }
        with bars() as bar:
            timed = self._speeds(shapes, bar)
            done = bar("cells", len(plan.suites) * len(plan.temperatures) * sum(map(len, shapes.values())))
            for suite in plan.suites:
                for temperature in plan.temperatures:
                    # Greedy trees are compared with the target's own text; sampled ones need none.
                    walked = self._walked(suite, temperature) if plan.chains or not temperature else None
                    for place in (Place(suite, temperature, name, each) for name in shapes for each in shapes[name]):
                        found.append(self._cell(place, walked, timed.get(place, ())))
                        done(1)
        return found

    def _walked(self, suite: str, temperature: float) -> WalkedTexts:
        """The target's own texts of a suite, and how all sources walk over them."""
        return walk_texts(
            self.loaded, self.config, f"{suite}, T={temperature:g}", self.plan.suites[suite].prompts, self.sources,
            sampling=self._sampling(temperature, 0), seed=self.plan.seed,
        )  # fmt: skip

    def _cell(self, place: Place, walked: WalkedTexts | None, speeds: Sequence[Speed]) -> Cell:
        shape, greedy = shape_of(place.shape), place.temperature == 0
        if not isinstance(shape, int):
            decoded = self._decode(place, None)
            compared = self._compare(place.suite, decoded, walked.texts) if greedy and walked else None
            return self.cell(place, decoded, Verified(len(decoded), None, compared), speeds)
        assert walked is not None
        walk = walked.by_rule("greedy" if greedy else "drawn")[place.source]
        seen = [Seen(text, counts[shape - 1]) for text, counts in zip(walked.texts, walk, strict=True)]
        decoded = self._decode(place, self.plan.verified_prompts) if greedy else []
        same = self._same_counts(place, decoded, seen, shape)
        compared = self._compare(place.suite, decoded, walked.texts) if decoded else None
        return self.cell(place, seen, Verified(len(decoded), same, compared), speeds)

    def _same_counts(self, place: Place, decoded: Sequence[Decoded], seen: Sequence[Seen], lookahead: int) -> int:
        """Greedy texts with the counts of a walk over them, which need not be the target's own: where logits tie."""
        same, source = 0, self.sources[place.source]
        for prompt, real, own in zip(self.plan.suites[place.suite].prompts, decoded, seen, strict=False):
            expected = own.counts
            if list(real.tokens) != list(own.tokens):
                expected = walk_decoded(self.loaded, source, [prompt], [real.tokens], lookahead)[0][-1]
            same += real.counts == expected
        return same

    def _decode(self, place: Place, most: int | None) -> list[Decoded]:
        """A suite's first `most` prompts, or all of them, some at a time."""
        prompts, together, loaded = self.plan.suites[place.suite].prompts[:most], self.plan.together, self.loaded
        decode = partial(
            speculate_together, loaded.target, self.sources[place.source], shape=shape_of(place.shape),
            max_new_tokens=self.plan.max_new_tokens, eos_ids=loaded.eos_ids,
            sampling=self._sampling(place.temperature, 0),
        )  # fmt: skip
        groups = [prompts[first : first + together] for first in range(0, len(prompts), together)]
        return [decoded for group in groups for decoded in decode(group)]

    def _compare(self, suite: str, decoded: Sequence[Decoded], own: Sequence[list[int]]) -> LosslessRecord:
        check = LosslessCheck(self.loaded.target, self.loaded.exact, self.plan.max_new_tokens, self.loaded.eos_ids)
        pairs = zip(self.plan.suites[suite].prompts, decoded, own, strict=False)
        return total(check.compare(prompt, each.tokens, text) for prompt, each, text in pairs)

    def _speeds(self, shapes: Mapping[str, Sequence[str]], bar: Bar) -> dict[Place, list[Speed]]:
        """Of every source and shape, on the first suite at the first temperature."""
        suite, temperature = next(iter(self.plan.suites)), self.plan.temperatures[0]
        alone = self.speeds(suite, "target alone", self._time_pass(PromptLookup(), 0, temperature), bar)
        found = dict[Place, list[Speed]]()
        for place in (Place(suite, temperature, name, each) for name in shapes for each in shapes[name]):
            time_pass = self._time_pass(self.sources[place.source], shape_of(place.shape), temperature)
            timed = self.speeds(suite, f"{place.source} {place.shape}", time_pass, bar)
            found[place] = judged(alone, timed)
        return found

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
        law = replace(sampled_law(self.config, self.loaded.recommended), temperature=temperature)
        return law.seeded(self.plan.seed + repeat, self.loaded.target.device)


def branches(source: ProposalSource) -> bool:
    """Whether a source proposes trees."""
    return source.proposers(1).branches


def judged(plain: Speeds, speeds: Speeds) -> list[Speed]:
    """Speeds at every batch size beside the target alone."""
    return [speed(batch, plain[batch], repeats) for batch, repeats in speeds.items()]


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


def _ground(name: str, prompts: SuitePrompts, decoded: Sequence[Seen | Decoded], rows: Sequence[int]) -> Ground:
    return Ground(
        name=name,
        dataset_hash=prompts.dataset_hash,
        margin=0.0,
        challenger=tuple((decoded[row].counts.tokens, decoded[row].counts.steps) for row in rows),
        champion=None,
        categories=tuple(prompts.categories[row] for row in rows) if prompts.categories else (),
        contexts=tuple(len(prompts.prompts[row]) for row in rows),
    )
