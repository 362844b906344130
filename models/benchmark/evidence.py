"""What the gate decides on: counts of every conversation on every ground, and what else can block a draft."""

from collections.abc import Sequence

from infra.records.acceptance import GateEvidence, Ground, ServedResult
from infra.records.goodput import GoodputEvidence, MeasuredGoodput
from models.benchmark.measure import Measurements, Walk, at
from models.config.benchmark import BenchmarkConfig, PromotionConfig
from models.decoding.acceptance import acceptance_length, distinct_token_share

HELD_OUT = "held-out prompts"


def gather(
    found: Measurements,
    suites: Sequence[Ground],
    config: BenchmarkConfig,
    promotion: PromotionConfig,
    *,
    dataset_hash: str,
    champion_label: str,
    served: ServedResult | None = None,
    goodput: MeasuredGoodput | None = None,
) -> GateEvidence:
    """The gate's evidence at `config.lookahead`."""
    lookahead = config.lookahead
    simulated = acceptance_length(at(found.draft, lookahead))
    return GateEvidence(
        champion_label=champion_label,
        resamples=promotion.resamples,
        max_gap=promotion.max_gap,
        min_distinct_token_share=config.min_distinct_token_share,
        distinct_token_share=distinct_token_share(found.greedy),
        mismatches=sum(comparison.mismatches for run in found.reference.values() for comparison in run.comparisons),
        gap=found.gap(lookahead),
        served_gap=served.length / simulated - 1 if served and served.length else None,
        category_tolerance=promotion.category_tolerance,
        goodput=goodput and GoodputEvidence(max_loss=promotion.max_goodput_loss, loads=goodput.by_load),
        grounds=(
            ground(HELD_OUT, dataset_hash, promotion.margin, found.draft, found.champion, lookahead),
            *suites,
        ),
    )


def ground(
    name: str,
    dataset_hash: str,
    margin: float,
    challenger: Walk,
    champion: Walk | None,
    lookahead: int,
    *,
    categories: tuple[str, ...] = (),
    contexts: tuple[int, ...] = (),
) -> Ground:
    """Both sides' counts of the same conversations at one lookahead, steps that the text's end cut left out.

    `categories` and `contexts` (prompt tokens) are of each conversation, or empty.
    """
    acceptance_length(at(challenger, lookahead))  # refuses conversations without a complete step
    return Ground(
        name=name,
        dataset_hash=dataset_hash,
        margin=margin,
        challenger=_sums(challenger, lookahead),
        champion=None if champion is None else _sums(champion, lookahead),
        categories=categories,
        contexts=contexts,
    )


def _sums(walk: Walk, lookahead: int) -> tuple[tuple[int, int], ...]:
    return tuple((counts.tokens, counts.steps) for counts in at(walk, lookahead))
