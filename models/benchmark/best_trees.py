"""The dynamic tree that gives most at each load, by measured step costs and by what trees would have held of the texts.

A tree's acceptance is counted over the target's own texts, as that of chains; trees are proposed with certainty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from infra.records.goodput import MeasuredGoodput, TreeGoodput
from models.benchmark.contestants import Contestants, SelectedLayers
from models.benchmark.measure import WALKED_ROWS
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import acceptance_length
from models.decoding.goodput import FittedCosts
from models.decoding.simulated import TextReading, read_texts
from models.decoding.tree_walk import ranks_of_texts, walk_tree
from models.drafts.batched_proposer import BranchingSource, DrawingSource, RolloutSource
from models.progress_bars import bars

SIZES = (3, 5, 7, 11, 15, 23, 31)
"""Tokens that trees keep; engines verify one more, and their kernels like whole fours."""
Shape = tuple[int, int, int]
"""Depth, top-k, tokens."""


def sizes_at(batch: int, config: BenchmarkConfig) -> list[int]:
    """Sizes that are looked at with `batch` texts: no more tokens of all texts than the longest chain or tree has.

    So step costs lie between measured ones; beyond them trees pay least.
    """
    most = max(max(config.loads) * (config.max_lookahead + 1), SIZES[-1] + 1)
    return [size for size in SIZES if batch * (size + 1) <= most]


def with_trees(
    found: MeasuredGoodput,
    contestants: Contestants,
    config: BenchmarkConfig,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> MeasuredGoodput:
    """Add the best tree at each load; none where no engine serves the draft's trees, or no top-k is asked for."""
    source = branching(contestants.draft)
    if source is None or not config.tree_topk:
        return found
    lengths = dict(_lengths(contestants, source, config, prompts, texts))
    costs = FittedCosts(found.draft.target, found.draft.draft)
    loads = sorted({row.batch for row in found.draft.rows})
    best = (_best(found, costs, lengths, batch, sizes_at(batch, config)) for batch in loads)
    return found.model_copy(update={"trees": tuple(tree for tree in best if tree is not None)})


def branching(source: RolloutSource) -> BranchingSource | None:
    """The draft, if an engine serves its trees."""
    draft = source.source if isinstance(source, SelectedLayers) else source
    return draft if isinstance(draft, BranchingSource) else None


def _lengths(
    contestants: Contestants,
    source: BranchingSource,
    config: BenchmarkConfig,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> Iterator[tuple[Shape, float]]:
    """The acceptance length of every tree that is looked at."""
    ranks: dict[int, list[Tensor]] = {topk: [] for topk in config.tree_topk}
    pairs = [pair for pair in zip(prompts, texts, strict=True) if len(pair[1]) > 1]
    ended = [text[-1] in contestants.eos_ids for _, text in pairs]
    together = max(1, min(config.batch_size, WALKED_ROWS // config.max_new_tokens))
    with bars() as bar:
        advance = bar("trees", len(pairs))
        for first in range(0, len(pairs), together):
            group = pairs[first : first + together]
            readings = read_texts(contestants.target, [[*prompt, *text] for prompt, text in group])
            readings = [_as_read_by(contestants.draft, reading) for reading in readings]
            own = [len(text) for _, text in group]
            for topk, of_texts in ranks.items():
                of_texts.extend(ranks_of_texts(source, readings, own, topk, config.max_lookahead))
            advance(len(group))
    for topk, of_texts in ranks.items():
        for depth in range(2, config.max_lookahead + 1):
            for size in SIZES:
                if depth <= size <= topk + (depth - 1) * topk**2:
                    counts = [
                        walk_tree(each, depth, size, ended=ends) for each, ends in zip(of_texts, ended, strict=True)
                    ]
                    if any(each.steps for each in counts):
                        yield (depth, topk, size), acceptance_length(counts)


def _as_read_by(source: DrawingSource, reading: TextReading) -> TextReading:
    return replace(reading, aux=source.select(reading.aux)) if isinstance(source, SelectedLayers) else reading


def _best(
    found: MeasuredGoodput, costs: FittedCosts, lengths: dict[Shape, float], batch: int, sizes: Sequence[int]
) -> TreeGoodput | None:
    """The tree of greatest goodput; of equals, the one with the fewest tokens."""
    seconds = {shape: costs.tree_seconds(batch, *shape) for shape in lengths if shape[2] in sizes}
    if not seconds:
        return None
    shape = max(seconds, key=lambda each: (lengths[each] / seconds[each], -each[2]))
    depth, topk, tokens = shape
    return TreeGoodput(
        batch=batch, depth=depth, topk=topk, tokens=tokens, tokens_per_step=lengths[shape], step_s=seconds[shape],
        tokens_per_s=batch * lengths[shape] / seconds[shape], without=found.draft.best_at(batch).tokens_per_s,
    )  # fmt: skip
