"""Builds the gate's evidence and `BenchmarkResult` from measurements: figures, verdict, and a summary."""

from collections.abc import Mapping, Sequence
from typing import Literal

from infra.records.acceptance import (
    BenchmarkResult,
    Conditions,
    GateEvidence,
    Ground,
    GroundAtLoad,
    RequestCounts,
    Rows,
    ServedResult,
    SideAtLoad,
    SuiteResult,
)
from infra.records.benchmark_text import summary
from infra.records.goodput import GoodputEvidence, MeasuredGoodput
from models.benchmark.gate import decide
from models.benchmark.measure import (
    CHAMPION,
    DRAFT,
    PROMPT_LOOKUP,
    DrawnWalk,
    Measurements,
    Walk,
    at,
)
from models.config.benchmark import BenchmarkConfig, PromotionConfig
from models.decoding.acceptance import Counts, acceptance_length, distinct_token_share, summarise

HELD_OUT = "held-out prompts"
NAMED = DRAFT, CHAMPION, PROMPT_LOOKUP
"""Sources that have fields of their own."""


def gather(
    found: Measurements,
    suites: Sequence[Ground],
    config: BenchmarkConfig,
    promotion: PromotionConfig,
    *,
    dataset_hash: str,
    champion_label: str,
    served_gap: float | None,
    goodput: MeasuredGoodput | None,
) -> GateEvidence:
    """What the gate decides on: counts on every ground, and what else can block a draft."""
    lookahead, traffic = config.lookahead, promotion.traffic
    walks = found.traffic(traffic.sampling).by_rule(config.sampled_proposals)
    heldout = ground(HELD_OUT, dataset_hash, promotion.margin, walks, lookahead)
    return GateEvidence(
        champion_label=champion_label,
        lookahead=lookahead,
        max_gap=promotion.max_gap,
        min_distinct_token_share=config.min_distinct_token_share,
        distinct_token_share=distinct_token_share(found.greedy.texts),
        mismatches=found.reference.lossless.mismatches,
        gap=found.gap(lookahead),
        served_gap=served_gap,
        category_tolerance=promotion.category_tolerance,
        goodput=goodput and GoodputEvidence(max_loss=promotion.max_goodput_loss, loads=goodput.by_load),
        grounds=(with_loads(heldout, walks, goodput, traffic.loads_of(config)), *suites),
    )


def ground(
    name: str,
    dataset_hash: str,
    margin: float,
    walks: Mapping[str, Sequence[Sequence[Counts]]],
    lookahead: int,
    *,
    categories: tuple[str, ...] = (),
    contexts: tuple[int, ...] = (),
) -> Ground:
    """All contestants' counts of the same conversations at one lookahead, steps that the maximum length cut left out.

    `walks` are of the sources by name. `categories` and `contexts` (prompt tokens) are of each conversation, or empty.
    """
    acceptance_length(at(walks[DRAFT], lookahead))  # refuses conversations without a complete step
    return Ground(
        name=name,
        dataset_hash=dataset_hash,
        margin=margin,
        challenger=rows(at(walks[DRAFT], lookahead)),
        champion=rows(at(walks[CHAMPION], lookahead)) if CHAMPION in walks else None,
        prompt_lookup=rows(at(walks[PROMPT_LOOKUP], lookahead)),
        categories=categories,
        contexts=contexts,
    )


def with_loads(
    compared: Ground,
    walks: Mapping[str, Sequence[Sequence[Counts]]],
    goodput: MeasuredGoodput | None,
    loads: Sequence[int],
) -> Ground:
    """Add every contestant at its best lookahead at each of `loads`, which are among those of `goodput`."""
    if goodput is None or not loads:
        return compared
    tables = {DRAFT: goodput.draft, CHAMPION: goodput.champion, PROMPT_LOOKUP: goodput.prompt_lookup}

    def side(name: str, load: int) -> SideAtLoad | None:
        table = tables[name]
        if table is None:
            return None
        best = table.proposing_at(load)
        return SideAtLoad(lookahead=best.lookahead, step_s=best.step_s, rows=rows(at(walks[name], best.lookahead)))

    def all_at(load: int) -> GroundAtLoad:
        challenger = side(DRAFT, load)
        assert challenger is not None
        return GroundAtLoad(
            batch=load, plain_step_s=goodput.draft.plain_at(load).step_s, challenger=challenger,
            champion=side(CHAMPION, load), prompt_lookup=side(PROMPT_LOOKUP, load),
        )  # fmt: skip

    return compared.model_copy(update={"loads": tuple(map(all_at, loads))})


def rows(side: Sequence[Counts]) -> Rows:
    """Tokens and complete steps of each conversation."""
    return tuple((counts.tokens, counts.steps) for counts in side)


def build_result(
    found: Measurements,
    config: BenchmarkConfig,
    conditions: Conditions,
    evidence: GateEvidence,
    *,
    traffic: Literal["greedy", "sampled"],
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
    result = BenchmarkResult(
        conditions=conditions,
        traffic=traffic,
        target_distinct_token_share=distinct_token_share(found.greedy.texts),
        sampled_distinct_token_share=distinct_token_share(found.sampled.texts),
        acceptance=greedy[DRAFT],
        reference=summarise([(decoded.counts,) for decoded in real]),
        gap=found.gap(at),
        counts_identical=identical,
        counts_compared=compared,
        sampled=sampled[DRAFT],
        sampled_drawn=drawn[DRAFT],
        prompt_lookup=greedy[PROMPT_LOOKUP],
        prompt_lookup_sampled=sampled[PROMPT_LOOKUP],
        more_baselines={name: of for name, of in greedy.items() if name not in NAMED},
        more_baselines_sampled={name: of for name, of in sampled.items() if name not in NAMED},
        served=served,
        goodput=goodput,
        champion=greedy.get(CHAMPION),
        champion_sampled=(drawn if config.sampled_proposals == "drawn" else sampled).get(CHAMPION),
        suites=tuple(suites),
        lossless=found.reference.lossless,
        speed=found.reference.speed,
        gate=decide(evidence),
        summary="",
        wall_s=0.0,
    )
    return result.model_copy(update={"summary": summary(result)})


def request_counts(found: Measurements, conditions: Conditions, prompts: Sequence[Sequence[int]]) -> RequestCounts:
    """Every conversation's counts at every lookahead, for tests that resample requests; `prompts`: of the first ones,
    which are kept with the target's greedy texts."""

    def by_lookahead(walk: Walk | DrawnWalk, texts: Sequence[Sequence[int]]) -> dict[int, Rows]:
        rows: dict[int, list[tuple[float, float]]] = {}
        for conversation, text in zip(walk, texts, strict=True):
            for counts in conversation:
                rows.setdefault(counts.lookahead, []).append(counts.as_served(len(text) - 1))
        return {lookahead: tuple(of) for lookahead, of in rows.items()}

    proposing = found.sampled.by_rule("drawn" if conditions.proposals == "drawn" else "greedy")
    return RequestCounts(
        conditions=conditions,
        greedy=by_lookahead(found.greedy.walks[DRAFT], found.greedy.texts),
        sampled=by_lookahead(proposing[DRAFT], found.sampled.texts),
        texts=tuple(tuple(text) for text in found.greedy.texts[: len(prompts)]),
        prompts=tuple(tuple(prompt) for prompt in prompts),
    )
