"""Seconds of the target's and of drafts' steps by texts at once and tokens of each, and the goodput that follows.

Real forwards of the models that are benchmarked, on the benchmark's hardware. All texts share a forward, as in engines.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from infra.provenance import hardware
from infra.records.goodput import CostFit, GoodputTable, MeasuredGoodput, StepTime
from models.benchmark.best_trees import branching, sizes_at
from models.benchmark.contestants import Contestants, draft_of, same_build
from models.benchmark.measure import CHAMPION, DRAFT, PROMPT_LOOKUP, DrawnWalk, Walk
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import summarise
from models.decoding.continuations import rows_of
from models.decoding.goodput import TERMS, FittedCosts, fit, goodput_table, rates_of
from models.decoding.stopwatch import now
from models.drafts.batched_proposer import RolloutSource
from models.progress_bars import Advance, bars
from models.targets.model import TargetModel

LEAST_ROUNDS, MOST_ROUNDS = 4, 20
"""Every step is timed once in a round. Its least time counts: whatever disturbs a machine only adds to it."""
BUDGET_S = 20.0
"""No further round starts after this time, once the minimum number is done."""
FREE = CostFit(**dict.fromkeys(TERMS, 0.0), knee=0.0)
"""Prompt lookup's own cost: it is as good as its texts are."""

Steps = dict[tuple[int, int], Callable[[], object]]
"""What is timed, one forward of the target or one drafting, by texts at once and tokens of each."""


def measure_goodput(
    contestants: Contestants, walked: Mapping[str, Walk | DrawnWalk], config: BenchmarkConfig
) -> MeasuredGoodput:
    """Goodput of the draft, of the champion if there is one, and of prompt lookup, at all of `config.loads`.

    `walked`: the walk of each over texts that are like the traffic. There must be a load.
    """
    sources = contestants.drafts
    walks = [walked[name] for name in (DRAFT, CHAMPION) if name in walked]
    target_times, draft_times = time_steps(contestants.target, sources, config)
    target_fit = fit(target_times)

    def table(walk: Walk | DrawnWalk, draft: CostFit, lookaheads: Sequence[int]) -> GoodputTable:
        return goodput_table(
            FittedCosts(target_fit, draft), rates_of(summarise(walk)), sorted(config.loads), lookaheads
        )

    tables = [
        table(walk, fit(times), servable(source, config))
        for source, walk, times in zip(sources, walks, draft_times, strict=True)
    ]
    return MeasuredGoodput(
        main_load=config.loads[0],
        draft=tables[0],
        champion=tables[1] if len(tables) > 1 else None,
        prompt_lookup=table(walked[PROMPT_LOOKUP], FREE, range(config.max_lookahead + 1)),
        target_times=target_times,
        draft_times=draft_times[0],
        hardware=hardware(),
    )


def servable(source: RolloutSource, config: BenchmarkConfig) -> tuple[int, ...]:
    """Lookaheads that a draft can be served with."""
    return draft_of(source).config.lookaheads(config.max_lookahead)


def time_steps(
    target: TargetModel, sources: Sequence[RolloutSource], config: BenchmarkConfig
) -> tuple[tuple[StepTime, ...], list[tuple[StepTime, ...]]]:
    """Seconds of the target's steps, and of each draft's; drafts of the same build are timed once.

    A few numbers of texts and of proposals are timed; a fit says the others.
    """
    # Two numbers of texts at least: a draft that is served in whole blocks has one lookahead only.
    batches = sorted({1, 2, *config.loads})
    trees = bool(config.tree_topk) and any(map(branching, sources))
    # A draft that grows trees runs several rows of each text.
    rows = sorted({*batches, *(load * topk for load in config.loads for topk in config.tree_topk if trees)})
    lookaheads = [_spread(servable(source, config)) for source in sources]
    originals = [next(at for at, other in enumerate(sources) if same_build(other, source)) for source in sources]
    built = sorted(set(originals))
    texts = _Texts(target, config.prompt_tokens, max(batches), max(rows))
    # Prompt lookup is verified at any lookahead.
    verified = sorted({at + 1 for each in [*lookaheads, _spread(range(config.max_lookahead + 1))] for at in each})
    of_trees = [(load, size + 1) for load in config.loads for size in sizes_at(load, config)[3::3] if trees]
    steps = sorted({*((batch, tokens) for batch in batches for tokens in verified), *of_trees})
    groups: list[Steps] = [{step: texts.verify(*step) for step in steps}]
    for index in built:
        proposed = [(batch, at) for batch in rows for at in lookaheads[index] if at]
        groups.append({(batch, at): texts.draft(sources[index], batch, at) for batch, at in proposed})
    with bars() as bar:
        target_times, *draft_times = _time(target, groups, bar("step costs", MOST_ROUNDS))
    by_build = dict(zip(built, draft_times, strict=True))
    return target_times, [by_build[original] for original in originals]


def _spread(lookaheads: Sequence[int]) -> list[int]:
    """The first two, one in the middle and the last: what a fit needs."""
    last = len(lookaheads) - 1
    return [lookaheads[place] for place in sorted({0, min(1, last), last // 2, last})]


class _Texts:
    """Random texts of equal length in the target's cache.

    What a step costs does not depend on what they say, but among experts it does on how many different tokens it has.

    Args:
        target: the target.
        length: tokens of each text that a step comes after.
        most: texts at once.
        rows: rows of a draft at once.
    """

    def __init__(self, target: TargetModel, length: int, most: int, rows: int):
        self.target, self._generator = target, torch.Generator().manual_seed(0)
        self.tokens, self.row = self._draw(most, length), self._draw(rows + 1)
        self.aux = target.forward(self.row[None, :-1]).features[0]
        self._cache = target.new_cache()
        target.forward(self.tokens, self._cache)

    def _draw(self, *shape: int) -> Tensor:
        tokens = torch.randint(len(self.target.head_weight), shape, generator=self._generator)
        return tokens.to(self.target.device)

    def verify(self, batch: int, tokens: int) -> Callable[[], Tensor]:
        """The target's step: `tokens` of each of `batch` texts after what its cache holds, and its choices there.

        All steps read the first rows of one cache, whose keys and values they leave as they are. States of linear
        attention change, but not in size, so the cost of a step does not either.
        """
        target, new = self.target, self._draw(batch, tokens)

        def run() -> Tensor:
            states = target.forward(new, rows_of(self._cache, slice(batch)))
            return target.logits(states.last.flatten(0, 1)).argmax(-1)

        return run

    def draft(self, source: RolloutSource, batch: int, lookahead: int) -> Callable[[], object]:
        """A draft's step for `batch` texts at once: a rollout has a row for each position, as a batch has for a text.

        The rows' texts are short, and one feature is new in each.
        """
        return partial(source.rollout, self.row[: batch + 1], self.aux[:batch], lookahead)


@torch.no_grad()
def _time(target: TargetModel, groups: Sequence[Steps], advance: Advance) -> list[tuple[StepTime, ...]]:
    """Least seconds of every step; a first round warms up."""
    least = [dict.fromkeys(steps, float("inf")) for steps in groups]
    begun = now(target.device)
    for done in range(MOST_ROUNDS):
        if done >= LEAST_ROUNDS and now(target.device) - begun > BUDGET_S:
            break
        for steps, seconds in zip(groups, least, strict=True):
            for step, run in steps.items():
                started = now(target.device)
                run()
                seconds[step] = min(seconds[step], now(target.device) - started)
        advance(1)
    return [
        tuple(StepTime(batch=batch, tokens=tokens, seconds=each) for (batch, tokens), each in seconds.items())
        for seconds in least
    ]
