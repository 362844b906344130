"""The facts of a run's report, and how figures are formatted."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from infra.ledger.answers import Quarantined
from infra.planner.measured import comparison
from infra.planner.plan import Plan
from infra.records.acceptance import Acceptance, BenchmarkResult, RegisteredDraft
from infra.records.data_path import GeneratorsChange, SampleProgress, SamplesRecord, TargetRecord, TrainingResult
from models.config.recipe import RunConfig


@dataclass(frozen=True)
class RunFacts:
    """Results of a finished run, as its tasks recorded them."""

    run: str
    """Name of the run."""
    config: RunConfig
    target: TargetRecord
    samples: SamplesRecord
    trained: TrainingResult
    result: BenchmarkResult
    draft: RegisteredDraft
    progress: SampleProgress
    quarantined: Sequence[Quarantined]
    written: datetime
    links: Sequence["Link"] = ()
    git_sha: str = "unknown"
    generators: Sequence[GeneratorsChange] = ()
    """Numbers of generators, in order."""
    plan: Plan | None = None
    """What the run was expected to take."""

    @property
    def planned(self) -> Sequence[tuple[str, str]]:
        """Planned and measured rates, and a better split if there is one."""
        return tuple(comparison(self.plan, self.trained.rates)) if self.plan else ()


@dataclass(frozen=True)
class Link:
    """A link, or text to copy if there is no address."""

    name: str
    text: str
    href: str | None = None
    """An http(s) address, or a path relative to the run folder."""

    @property
    def is_anywhere(self) -> bool:
        """Whether it is of use outside the run folder."""
        return self.href is None or self.href.startswith(("http://", "https://"))


def sources(result: BenchmarkResult) -> dict[str, Acceptance]:
    """Every source of proposals that was measured, the draft first."""
    top_p = f", top-p {result.conditions.sampled_top_p:g}" if result.conditions.sampled_top_p < 1 else ""
    sampled = f"temperature {result.conditions.sampled_temperature:g}{top_p}"
    measured: dict[str, Acceptance | None] = {
        "draft, simulated": result.simulated,
        "draft, real decoding": result.reference,
        "draft, served": result.served and result.served.acceptance,
        "champion": result.champion,
        **result.baselines,
        f"draft, {sampled}, greedy proposals": result.sampled,
        f"draft, {sampled}, sampled proposals": result.sampled_reference,
        **{f"{name}, {sampled}": acceptance for name, acceptance in result.baselines_sampled.items()},
    }
    return {name: acceptance for name, acceptance in measured.items() if acceptance}


def acceptance_rows(result: BenchmarkResult) -> list[dict[str, str]]:
    """Acceptance length by lookahead: one row per source, one column per lookahead; empty where not measured."""
    lookaheads = sorted(result.simulated.length)
    return [
        {"": name} | {str(at): length(acceptance.length[at]) if at in acceptance.length else "" for at in lookaheads}
        for name, acceptance in sources(result).items()
    ]


def acceptance_by_lookahead(result: BenchmarkResult) -> list[dict[str, int | str]]:
    """The same the other way round: one row per lookahead, for Prefect, whose page needs named columns."""
    return [
        {"lookahead": at}
        | {name: length(of.length[at]) if at in of.length else "" for name, of in sources(result).items()}
        for at in sorted(result.simulated.length)
    ]


def goodput_rows(result: BenchmarkResult) -> list[dict[str, str]]:
    """The best lookahead and its predicted goodput at each load; empty if not measured."""
    found = result.goodput
    if found is None:
        return []
    rows = []
    for load in found.by_load:
        plain = found.draft.plain_at(load.batch).tokens_per_s
        row = {
            "texts at once": str(load.batch),
            "best lookahead": str(load.challenger_lookahead),
            "tokens/s": rate(load.challenger),
            "target alone": rate(plain),
            "gain": signed(load.challenger / plain - 1),
        }
        if load.champion is not None:
            row |= {"champion": rate(load.champion), "its lookahead": str(load.champion_lookahead)}
        rows.append(row)
    return rows


def length(value: float) -> str:
    """An acceptance length."""
    return f"{value:.2f}"


def count(value: int) -> str:
    return f"{value:,}"


def share(value: float) -> str:
    return f"{value:.1%}"


def signed(value: float) -> str:
    """A relative difference."""
    return f"{value:+.1%}".replace("-", "−")


def rate(value: float | None) -> str:
    """Tokens per second."""
    if value is None:
        return "not published"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Two units at most: `4.2 s`, `5 min 11 s`, `3 h 7 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def generators_in_words(facts: RunFacts) -> str:
    """How many there were at a time."""
    numbers = [change.generators for change in facts.generators] or [facts.trained.rates.generators]
    least, most = min(numbers), max(numbers)
    return plural(most, "generator") if least == most else f"{least} to {plural(most, 'generator')}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
