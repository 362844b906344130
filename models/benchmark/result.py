"""Builds the gate's evidence and `BenchmarkResult` from measurements: figures, verdict, and a summary."""

from collections.abc import Sequence

from infra.records.acceptance import (
    BenchmarkResult,
    Conditions,
    GateEvidence,
    Ground,
    RequestCounts,
    ServedResult,
    SuiteResult,
)
from infra.records.benchmark_text import summary
from infra.records.goodput import GoodputEvidence, MeasuredGoodput
from models.benchmark.gate import decide
from models.benchmark.measure import (
    CHAMPION,
    DRAFT,
    PROMPT_LOOKUP,
    TOKEN_RECYCLING,
    Measurements,
    WalkedTexts,
    at,
)
from models.config.benchmark import BenchmarkConfig, PromotionConfig
from models.decoding.acceptance import AcceptedCounts, acceptance_length, distinct_token_share, summarise

HELD_OUT = "held-out prompts"


def gather(
    found: Measurements,
    suites: Sequence[Ground],
    config: BenchmarkConfig,
    promotion: PromotionConfig,
    *,
    dataset_hash: str,
    champion_label: str,
    served: ServedResult | None,
    goodput: MeasuredGoodput | None,
) -> GateEvidence:
    """What the gate decides on at `config.lookahead`: counts on every ground, and what else can block a draft."""
    lookahead = config.lookahead
    simulated = acceptance_length(at(found.greedy.walks[DRAFT], lookahead))
    return GateEvidence(
        champion_label=champion_label,
        resamples=promotion.resamples,
        max_gap=promotion.max_gap,
        min_distinct_token_share=config.min_distinct_token_share,
        distinct_token_share=distinct_token_share(found.greedy.texts),
        mismatches=found.reference.lossless.mismatches,
        gap=found.gap(lookahead),
        served_gap=served.length / simulated - 1 if served and served.length else None,
        category_tolerance=promotion.category_tolerance,
        goodput=goodput and GoodputEvidence(max_loss=promotion.max_goodput_loss, loads=goodput.by_load),
        grounds=(ground(HELD_OUT, dataset_hash, promotion.margin, *sides(found.greedy, lookahead)), *suites),
    )


def sides(walked: WalkedTexts, lookahead: int) -> tuple[list[AcceptedCounts], list[AcceptedCounts] | None]:
    """Counts of draft and champion, if there is one, of every conversation at one lookahead."""
    champion = walked.walks.get(CHAMPION)
    return at(walked.walks[DRAFT], lookahead), None if champion is None else at(champion, lookahead)


def ground(
    name: str,
    dataset_hash: str,
    margin: float,
    challenger: Sequence[AcceptedCounts],
    champion: Sequence[AcceptedCounts] | None,
    *,
    categories: tuple[str, ...] = (),
    contexts: tuple[int, ...] = (),
) -> Ground:
    """Both sides' counts of the same conversations at the same lookahead, steps that the text's end cut left out.

    `categories` and `contexts` (prompt tokens) are of each conversation, or empty.
    """

    def sums(side: Sequence[AcceptedCounts]) -> tuple[tuple[int, int], ...]:
        return tuple((counts.tokens, counts.steps) for counts in side)

    acceptance_length(challenger)  # refuses conversations without a complete step
    return Ground(
        name=name,
        dataset_hash=dataset_hash,
        margin=margin,
        challenger=sums(challenger),
        champion=None if champion is None else sums(champion),
        categories=categories,
        contexts=contexts,
    )


def build_result(
    found: Measurements,
    config: BenchmarkConfig,
    conditions: Conditions,
    evidence: GateEvidence,
    *,
    served: ServedResult | None,
    suites: Sequence[SuiteResult],
    goodput: MeasuredGoodput | None,
) -> BenchmarkResult:
    """Put everything together; who measured adds the duration."""
    at, real = config.lookahead, found.reference.decoded
    greedy, sampled = (
        {name: summarise(walk) for name, walk in walked.walks.items()} for walked in (found.greedy, found.sampled)
    )
    identical, compared = found.identical(at)
    drawn = {name: summarise(walk) for name, walk in found.sampled.drawn.items()}
    sampled_real = [(decoded.counts,) for decoded in found.sampled_reference]
    result = BenchmarkResult(
        conditions=conditions,
        target_distinct_token_share=distinct_token_share(found.greedy.texts),
        sampled_distinct_token_share=distinct_token_share(found.sampled.texts),
        acceptance=greedy[DRAFT],
        reference=summarise([(decoded.counts,) for decoded in real]),
        gap=found.gap(at),
        counts_identical=identical,
        counts_compared=compared,
        sampled=sampled[DRAFT],
        sampled_drawn=drawn[DRAFT],
        sampled_reference=summarise(sampled_real) if sampled_real else None,
        sampled_deviation=found.sampled_deviation(at),
        prompt_lookup=greedy[PROMPT_LOOKUP],
        prompt_lookup_sampled=sampled[PROMPT_LOOKUP],
        token_recycling=greedy[TOKEN_RECYCLING],
        token_recycling_sampled=sampled[TOKEN_RECYCLING],
        served=served,
        goodput=goodput,
        champion=greedy.get(CHAMPION),
        beats_prompt_lookup=greedy[DRAFT].length[at] > greedy[PROMPT_LOOKUP].length[at],
        vocabulary_mass=found.vocabulary_mass,
        beats_token_recycling=greedy[DRAFT].length[at] > greedy[TOKEN_RECYCLING].length[at],
        suites=tuple(suites),
        lossless=found.reference.lossless,
        speed=found.reference.speed,
        gate=decide(evidence),
        summary="",
        wall_s=0.0,
    )
    return result.model_copy(update={"summary": summary(result)})


def request_counts(found: Measurements, conditions: Conditions) -> RequestCounts:
    """Every conversation's counts at every lookahead, for tests that resample requests."""

    def by_lookahead(walked: WalkedTexts) -> dict[int, tuple[tuple[int, int], ...]]:
        rows: dict[int, list[tuple[int, int]]] = {}
        for conversation, text in zip(walked.walks[DRAFT], walked.texts, strict=True):
            for counts in conversation:
                rows.setdefault(counts.lookahead, []).append(counts.as_served(len(text) - 1))
        return {lookahead: tuple(of) for lookahead, of in rows.items()}

    return RequestCounts(
        conditions=conditions,
        greedy=by_lookahead(found.greedy),
        sampled=by_lookahead(found.sampled),
    )
