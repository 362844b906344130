"""Builds the gate's evidence and `BenchmarkResult` from measurements: figures, verdict, and a summary."""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.records.acceptance import (
    BenchmarkResult,
    Conditions,
    GateEvidence,
    Ground,
    RequestCounts,
    ServedResult,
    SuiteResult,
)
from infra.records.benchmark_text import sampling
from infra.records.goodput import GoodputEvidence, MeasuredGoodput
from models.benchmark.gate import decide
from models.benchmark.measure import (
    CHAMPION,
    DRAFT,
    PROMPT_LOOKUP,
    TOKEN_RECYCLING,
    Measurements,
    Walk,
    WalkedTexts,
    at,
)
from models.config.benchmark import BenchmarkConfig, PromotionConfig
from models.decoding.acceptance import acceptance_length, distinct_token_share, summarise

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
        grounds=(ground(HELD_OUT, dataset_hash, promotion.margin, found.greedy, lookahead), *suites),
    )


def ground(
    name: str,
    dataset_hash: str,
    margin: float,
    walked: WalkedTexts,
    lookahead: int,
    *,
    categories: tuple[str, ...] = (),
    contexts: tuple[int, ...] = (),
) -> Ground:
    """Both sides' counts of the same conversations at one lookahead, steps that the text's end cut left out.

    `categories` and `contexts` (prompt tokens) are of each conversation, or empty.
    """

    def sums(walk: Walk) -> tuple[tuple[int, int], ...]:
        return tuple((counts.tokens, counts.steps) for counts in at(walk, lookahead))

    champion = walked.walks.get(CHAMPION)
    acceptance_length(at(walked.walks[DRAFT], lookahead))  # refuses conversations without a complete step
    return Ground(
        name=name,
        dataset_hash=dataset_hash,
        margin=margin,
        challenger=sums(walked.walks[DRAFT]),
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
    wall_s: float,
    served: ServedResult | None,
    suites: Sequence[SuiteResult],
    goodput: MeasuredGoodput | None,
) -> BenchmarkResult:
    """Put everything together."""
    at, real = config.lookahead, found.reference.decoded
    greedy, sampled = (
        {name: summarise(walk) for name, walk in walked.walks.items()} for walked in (found.greedy, found.sampled)
    )
    distinct, sampled_distinct = map(distinct_token_share, (found.greedy.texts, found.sampled.texts))
    identical, compared = found.identical(at)
    sampled_real = [(decoded.counts,) for decoded in found.sampled_reference]
    lengths, sampled_lengths = (
        Lengths(of[DRAFT].length[at], of[PROMPT_LOOKUP].length[at], of[TOKEN_RECYCLING].length[at], share)
        for of, share in ((greedy, distinct), (sampled, sampled_distinct))
    )
    return BenchmarkResult(
        conditions=conditions,
        target_distinct_token_share=distinct,
        sampled_distinct_token_share=sampled_distinct,
        simulated=greedy[DRAFT],
        reference=summarise([(decoded.counts,) for decoded in real]),
        gap=found.gap(at),
        counts_identical=identical,
        counts_compared=compared,
        sampled=sampled[DRAFT],
        sampled_reference=summarise(sampled_real) if sampled_real else None,
        prompt_lookup=greedy[PROMPT_LOOKUP],
        prompt_lookup_sampled=sampled[PROMPT_LOOKUP],
        token_recycling=greedy[TOKEN_RECYCLING],
        token_recycling_sampled=sampled[TOKEN_RECYCLING],
        served=served,
        goodput=goodput,
        champion=greedy.get(CHAMPION),
        beats_prompt_lookup=lengths.draft > lengths.prompt_lookup,
        vocabulary_mass=found.vocabulary_mass,
        beats_token_recycling=lengths.draft > lengths.token_recycling,
        suites=tuple(suites),
        lossless=found.reference.lossless,
        speed=found.reference.speed,
        gate=decide(evidence),
        summary=against_baselines(at, lengths, sampled_lengths, sampling(conditions)),
        wall_s=wall_s,
    )


@dataclass(frozen=True)
class Lengths:
    """Acceptance lengths of draft and baselines on the same texts, and the texts' share of distinct tokens."""

    draft: float
    prompt_lookup: float
    token_recycling: float
    distinct_share: float


def against_baselines(lookahead: int, greedy: Lengths, sampled: Lengths, at: str) -> str:
    """Whether the draft beats the baselines that need no training, and why not where it does not; `at` names how the
    sampled text was drawn."""
    baselines = {"prompt lookup": greedy.prompt_lookup, "Token Recycling": greedy.token_recycling}
    beaten = [f"{name} ({length:.2f})" for name, length in baselines.items() if greedy.draft > length]
    others = [f"{name} ({length:.2f})" for name, length in baselines.items() if greedy.draft <= length]
    said = [f"beats {' and '.join(beaten)}"] if beaten else []
    said += [f"does not beat {' or '.join(others)}"] if others else []
    text = (
        f"the draft {' but '.join(said)} here: {greedy.draft:.2f} tokens per verification step at lookahead {lookahead}"
    )
    loses = greedy.draft <= greedy.prompt_lookup
    repeats = greedy.distinct_share < sampled.distinct_share and sampled.prompt_lookup < greedy.prompt_lookup
    if loses and repeats:
        text += (
            ", because the target's greedy text repeats itself (distinct-token share "
            f"{greedy.distinct_share:.2f}, {sampled.distinct_share:.2f} when sampled)"
        )
    against = f"{sampled.prompt_lookup:.2f} and {sampled.token_recycling:.2f}"
    return f"{text}; over text sampled at {at}, {sampled.draft:.2f} against {against}"


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
