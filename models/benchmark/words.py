"""A benchmark as text: its table, and the comparison with baselines that need no training."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from infra.records.acceptance import Acceptance, BenchmarkResult, Conditions, DivergenceRecord, GroupAcceptance


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


def sampled_at(conditions: Conditions) -> str:
    """Temperature of the sampled figures, and top-p unless it is 1."""
    top_p = f", top-p {conditions.sampled_top_p:g}" if conditions.sampled_top_p < 1 else ""
    return f"T={conditions.sampled_temperature:g}{top_p}"


def table(result: BenchmarkResult) -> Table:
    """Acceptance length by lookahead, one row per source."""
    shown = Table(title=f"Acceptance length by lookahead, {result.conditions.target}")
    shown.add_column("")
    for lookahead in result.simulated.length:
        shown.add_column(str(lookahead), justify="right")
    sampled = sampled_at(result.conditions)
    rows = {
        "draft, simulated": result.simulated,
        "draft, reference": result.reference,
        "draft, served": result.served and result.served.acceptance,
        "champion, simulated": result.champion,
        **result.baselines,
        f"draft, {sampled}, greedy proposals": result.sampled,
        f"draft, {sampled}, sampled proposals": result.sampled_reference,
        **{f"{name}, {sampled}": acceptance for name, acceptance in result.baselines_sampled.items()},
    }
    for name, acceptance in rows.items():
        if acceptance is not None:
            shown.add_row(name, *_cells(acceptance, result))
    return shown


def _cells(acceptance: Acceptance, result: BenchmarkResult) -> list[str]:
    lengths = acceptance.length
    return [f"{lengths[at]:.2f}" if at in lengths else "" for at in result.simulated.length]


def lines(result: BenchmarkResult) -> list[str]:
    """What the table does not show, one fact a line; the last one is the summary."""
    lossless, speed, at = result.lossless, result.speed, result.conditions.lookahead
    faster = f"{speed.speculative_tokens_per_s:.1f}" if speed.speculative_tokens_per_s else "not published"
    same = "identical" if result.counts_identical else "NOT identical"
    found = [
        f"lossless: {lossless.tokens} tokens, {lossless.mismatches} mismatches, {lossless.ties} ties",
        f"simulated and reference counts {same} in {result.counts_compared} conversations, gap {result.gap:+.2%}",
        f"tokens/s at batch 1: {speed.plain_tokens_per_s:.1f} plain, {faster} speculative ({speed.note})",
        *([result.served.summary] if result.served else []),
        *_goodput(result),
        f"distinct-token share of the target: {result.target_distinct_token_share:.2f} greedy, "
        f"{result.sampled_distinct_token_share:.2f} sampled",
        *_vocabulary(result),
        *_sampled_reference(result),
        *_suites(result),
        *_categories(result),
        f"gate: {'passed' if result.gate.passed else 'not passed'}, {result.gate.reason} (smallest detectable "
        f"{result.gate.smallest_detectable:.1%})",
        result.summary,
    ]
    found += [f"  tie at token {tie.position}: gap {tie.gap:.2e}, delta {tie.delta:.2e}" for tie in _ties(result)]
    return [*found, f"acceptance length {result.simulated.length[at]:.2f} at lookahead {at} in {result.wall_s:.0f} s"]


def _suites(result: BenchmarkResult) -> Iterator[str]:
    """Acceptance length of every suite, category and range of prompt tokens at the benchmark's lookahead."""
    for suite in result.suites:
        left_out = f", {suite.too_long} questions too long" if suite.too_long else ""
        yield f"{suite.name}: {_group(suite.whole)}{left_out}, distinct-token share {suite.distinct_token_share:.2f}"
        for what, parts in (("by category", suite.by_category), ("by prompt tokens", suite.by_context)):
            if len(parts) > 1:
                yield f"  {what}: " + "; ".join(f"{part.group} {_group(part)}" for part in parts)


def _group(part: GroupAcceptance) -> str:
    length = "no complete step" if part.length is None else f"{part.length:.2f}"
    champion = "" if part.champion is None else f", champion {part.champion:.2f}"
    return f"{length}{champion} ({part.conversations})"


def _categories(result: BenchmarkResult) -> Iterator[str]:
    """What each category can show against the champion."""
    for each in result.gate.categories:
        said = (
            "too few prompts to judge"
            if each.p is None
            else f"p = {each.p:.2g} (Holm), smallest detectable worsening {each.smallest_detectable:.1%}"
        )
        verdict = ", BLOCKS" if each.blocks else ""
        yield f"  {each.ground}, {each.category}: {each.difference:+.1%} on {each.prompts} prompts, {said}{verdict}"


def _goodput(result: BenchmarkResult) -> list[str]:
    found = result.goodput
    if found is None:
        return []
    best = [found.draft.best_at(batch) for batch in found.draft.best]
    loads = ", ".join(
        f"{row.batch} at once: lookahead {row.lookahead}, {row.tokens_per_s:.1f} tokens/s "
        f"({row.tokens_per_s / found.draft.plain_at(row.batch).tokens_per_s:.2f}x the target alone)"
        for row in best
    )
    return [f"best predicted goodput with {loads}"]


def _vocabulary(result: BenchmarkResult) -> list[str]:
    mass = result.vocabulary_mass
    return [] if mass is None else [f"the draft vocabulary holds {mass:.1%} of the target's probability"]


def _sampled_reference(result: BenchmarkResult) -> list[str]:
    real, at = result.sampled_reference, result.conditions.lookahead
    if real is None:
        return []
    return [
        f"at {sampled_at(result.conditions)} and lookahead {at}: {real.length[at]:.2f} where the draft samples its "
        f"proposals (real decoding, {real.steps[at]} steps), {result.sampled.length[at]:.2f} where it proposes "
        f"greedily (simulated, {result.sampled.steps[at]} steps); two decoders, so the figures need not agree"
    ]


def _ties(result: BenchmarkResult) -> list[DivergenceRecord]:
    return [divergence for divergence in result.lossless.divergences if divergence.tie]
