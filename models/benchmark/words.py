"""A benchmark on the terminal: its tables, and the comparison with baselines that need no training."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from infra.records.acceptance import BenchmarkResult
from infra.records.benchmark_text import acceptance_rows, findings, goodput_rows, suite_findings


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


def tables(result: BenchmarkResult) -> Iterator[Table]:
    """Acceptance length by lookahead, and predicted goodput by load if it was measured."""
    titled = {f"Draft for {result.conditions.target}": acceptance_rows(result)}
    titled["Predicted goodput"] = goodput_rows(result)
    for title, rows in titled.items():
        if rows:
            shown = Table(title=title)
            for at, name in enumerate(rows[0]):
                shown.add_column(name, justify="right" if at else "left")
            for row in rows:
                shown.add_row(*row.values())
            yield shown


def lines(result: BenchmarkResult) -> list[str]:
    """What the tables do not show, one fact per line."""
    at = result.conditions.lookahead
    ties = [divergence for divergence in result.lossless.divergences if divergence.tie]
    return [
        *(f"{topic}: {text}" for topic, text in (findings(result) | suite_findings(result)).items()),
        *(f"Tie at token {tie.position}: gap {tie.gap:.2e}, delta {tie.delta:.2e}" for tie in ties),
        result.summary,
        f"acceptance length {result.simulated.length[at]:.2f} at lookahead {at} in {result.wall_s:.0f} s",
    ]
