"""Builds `BenchmarkResult` from measurements: figures, the gate's verdict, and a summary."""

from collections.abc import Sequence
from math import isfinite

from infra.records.acceptance import (
    BenchmarkResult,
    Conditions,
    DivergenceRecord,
    GateEvidence,
    LosslessRecord,
    RequestCounts,
    ServedResult,
    SuiteResult,
)
from infra.records.benchmark_text import sampling
from infra.records.goodput import MeasuredGoodput
from models.benchmark.gate import decide
from models.benchmark.measure import Measurements, Texts, Walk
from models.benchmark.words import Lengths, against_baselines
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import distinct_token_share, summarise
from models.decoding.lossless import Comparison, total


def build_result(
    found: Measurements,
    config: BenchmarkConfig,
    conditions: Conditions,
    evidence: GateEvidence,
    *,
    wall_s: float,
    served: ServedResult | None = None,
    suites: Sequence[SuiteResult] = (),
    goodput: MeasuredGoodput | None = None,
) -> BenchmarkResult:
    """Put everything together."""
    at = config.lookahead
    draft, lookup, recycling = map(summarise, (found.draft, found.prompt_lookup, found.token_recycling))
    draft_sampled, lookup_sampled, recycling_sampled = map(
        summarise, (found.draft_sampled, found.prompt_lookup_sampled, found.token_recycling_sampled)
    )
    lossless = total([comparison for run in found.reference.values() for comparison in run.comparisons])
    distinct, distinct_sampled = distinct_token_share(found.greedy), distinct_token_share(found.sampled)
    identical, compared = found.identical(at)
    sampled = [(decoded.counts,) for decoded in found.sampled_reference]
    runs = [found.reference[lookahead] for lookahead in sorted(found.reference)]
    return BenchmarkResult(
        conditions=conditions,
        target_distinct_token_share=distinct,
        sampled_distinct_token_share=distinct_sampled,
        simulated=draft,
        reference=summarise([tuple(d.counts for d in of) for of in zip(*(run.decoded for run in runs), strict=False)]),
        gap=found.gap(at),
        counts_identical=identical,
        counts_compared=compared,
        sampled=draft_sampled,
        sampled_reference=summarise(sampled) if sampled else None,
        prompt_lookup=lookup,
        prompt_lookup_sampled=lookup_sampled,
        token_recycling=recycling,
        token_recycling_sampled=recycling_sampled,
        served=served,
        goodput=goodput,
        champion=None if found.champion is None else summarise(found.champion),
        beats_prompt_lookup=draft.length[at] > lookup.length[at],
        vocabulary_mass=found.vocabulary_mass,
        beats_token_recycling=draft.length[at] > recycling.length[at],
        suites=tuple(suites),
        lossless=lossless_record(lossless),
        speed=found.reference[at].speed,
        gate=decide(evidence),
        summary=against_baselines(
            at,
            Lengths(draft.length[at], lookup.length[at], recycling.length[at], distinct),
            Lengths(
                draft_sampled.length[at], lookup_sampled.length[at], recycling_sampled.length[at], distinct_sampled
            ),
            sampling(conditions),
        ),
        wall_s=wall_s,
    )


def request_counts(found: Measurements, conditions: Conditions) -> RequestCounts:
    """Every conversation's counts at every lookahead, for tests that resample requests."""

    def by_lookahead(walk: Walk, texts: Texts) -> dict[int, tuple[tuple[int, int], ...]]:
        rows: dict[int, list[tuple[int, int]]] = {}
        for conversation, text in zip(walk, texts, strict=True):
            for counts in conversation:
                rows.setdefault(counts.lookahead, []).append(counts.as_served(len(text) - 1))
        return {lookahead: tuple(of) for lookahead, of in rows.items()}

    return RequestCounts(
        conditions=conditions,
        greedy=by_lookahead(found.draft, found.greedy),
        sampled=by_lookahead(found.draft_sampled, found.sampled),
    )


def lossless_record(comparison: Comparison) -> LosslessRecord:
    """The verdict as it is written down."""
    return LosslessRecord(
        tokens=comparison.tokens,
        mismatches=comparison.mismatches,
        ties=comparison.ties,
        divergences=tuple(
            DivergenceRecord(
                position=found.position,
                token=found.token,
                gap=found.gap if isfinite(found.gap) else None,
                delta=found.delta,
                tie=found.tie,
            )
            for found in comparison.divergences
        ),
    )
