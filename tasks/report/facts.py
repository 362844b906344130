"""The facts of a run's report."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from infra.ledger.answers import Quarantined
from infra.planner.measured import comparison
from infra.planner.plan import Plan
from infra.quantities import plural
from infra.records.acceptance import BenchmarkResult, RegisteredDraft
from infra.records.benchmark_text import sources
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


def acceptance_by_lookahead(result: BenchmarkResult) -> list[dict[str, int | str]]:
    """Acceptance length, one row per lookahead, for Prefect, whose page needs named columns."""
    return [
        {"lookahead": at}
        | {name: f"{of.length[at]:.2f}" if at in of.length else "" for name, of in sources(result).items()}
        for at in sorted(result.simulated.length)
    ]


def generators_in_words(facts: RunFacts) -> str:
    """How many there were at a time."""
    numbers = [change.generators for change in facts.generators] or [facts.trained.rates.generators]
    least, most = min(numbers), max(numbers)
    return plural(most, "generator") if least == most else f"{least} to {plural(most, 'generator')}"
