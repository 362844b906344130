"""A run's results as pages: `report.html`, and Markdown for Prefect and MLflow."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from infra.data_plane.bottleneck import in_words
from infra.ledger.answers import Quarantined
from infra.planner.plan import Plan, comparison
from infra.quantities import plural, signed
from infra.records.acceptance import BenchmarkResult, RegisteredDraft
from infra.records.benchmark_text import acceptance_tables, findings, goodput_rows, suite_findings, text_of
from infra.records.data_path import GeneratorsChange, SampleProgress, SamplesRecord, TargetRecord, TrainingResult
from infra.redaction import redacted
from infra.run.device_time import DeviceTime
from infra.templates import render
from models.config.recipe import RunConfig
from tasks.report.meaning import answer, compared, how_good, meaning

FOLDER = Path(__file__).parent
CAPTIONS = {
    "acceptance_by_position": "Acceptance rate at each position of the proposed tokens, given that all before it "
    "were accepted. Where a curve ends, fewer than 20 tokens were offered.",
    "heldout": "Acceptance length while training: on held-out prompts by the simulated walk, and on the training text.",
    "goodput": "Predicted tokens per second by lookahead, relative to the target alone, one curve for each number of "
    "texts decoded at once; the best lookahead of each is marked.",
    "samples": "Training samples by length, by supervised tokens and, of conversations, by the assistant's turns.",
    "timeline": "Who waited for whom: share of the time that the trainer waited for data, and that generators could "
    "have given more than the trainer took.",
    "training": "Loss and acceptance rate at each position during training, over the tokens trained on; of a long run "
    "each point is the mean of neighbouring steps.",
}
GAP = "&emsp;"
"""MLflow shows a table without any space between its cells."""
LISTED = 50
"""Quarantined samples shown in Prefect; the rest are in report.html."""


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


class Plot(NamedTuple):
    """A picture inside the page."""

    name: str
    caption: str
    uri: str


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
    links: Sequence[Link] = ()
    git_sha: str = "unknown"
    generators: Sequence[GeneratorsChange] = ()
    """Numbers of generators, in order."""
    plan: Plan | None = None
    """What the run was expected to take."""
    devices: DeviceTime = field(default_factory=lambda: DeviceTime({}))
    is_served: bool = True
    """Whether some serving engine reads the exported draft."""
    settings_for: Sequence[str] = ()
    """Engines whose settings are in `export/serving`."""

    @property
    def planned(self) -> Mapping[str, str]:
        """Planned and measured rates, and a better split if there is one."""
        return comparison(self.plan, self.trained.rates) if self.plan else {}

    @property
    def bottleneck(self) -> str:
        return in_words(self.trained.rates)

    @property
    def processes(self) -> str:
        """Generators at a time, and ranks."""
        numbers = [change.generators for change in self.generators] or [self.trained.rates.generators]
        least = f"{min(numbers)} to " if min(numbers) < max(numbers) else ""
        return f"{least}{plural(max(numbers), 'generator')}, {plural(self.trained.rates.ranks, 'rank')}"

    @property
    def epochs(self) -> str:
        """How often the samples were read: fewer times than planned where `max_steps` ended the training."""
        training = self.config.training
        planned = -(-self.samples.train_samples // training.samples_per_step) * training.epochs
        read = training.epochs * self.trained.steps / planned
        return f"{read:.2g} of {training.epochs}" if read < training.epochs else str(training.epochs)

    @property
    def by_position(self) -> str:
        """Acceptance rates while training."""
        return ", ".join(f"{rate:.2f}" for rate in self.trained.acceptance_by_position)

    @property
    def vocabulary(self) -> str:
        """How much of the text and of the target's own choices a draft can express."""
        shares = {
            "of the supervised tokens": self.trained.token_coverage,
            "of the positions trained on": self.trained.vocabulary_coverage,
        }
        return ", ".join(f"{share:.1%} {whole}" for whole, share in shares.items() if share is not None)

    @property
    def answers(self) -> str:
        """Whose answers the samples hold, where they are not those of the source."""
        settings, unanswered = self.config.data.regeneration, self.samples.unanswered
        if settings is None:
            return ""
        during = f"; {plural(unanswered, 'sample')} answered while captured" if unanswered else ""
        limit = plural(settings.max_new_tokens, "token")
        return f"the target's own, at temperature {settings.temperature:g}, of at most {limit}{during}"

    @property
    def sample_states(self) -> str:
        """The final states of all samples."""
        progress = self.progress
        rest = progress.total - progress.consumed - progress.quarantined
        failures = f", {plural(progress.attempts, 'capture failure')}" if progress.attempts else ""
        return (
            f"{progress.consumed:,} of {plural(progress.total, 'sample')} trained on, "
            f"{progress.quarantined or 'none'} quarantined{failures}{f', {rest:,} not reached' if rest else ''}"
        )

    @property
    def findings(self) -> Mapping[str, str]:
        """What the tables do not show, by topic."""
        steps, tokens = plural(self.trained.steps, "step"), plural(self.trained.tokens, "token")
        return {
            **findings(self.result),
            "Trained": f"{steps} on {tokens}; {self.bottleneck}",
            **({"Twice the data": more.in_words} if (more := self.trained.more_data) else {}),
            **{f"Plan, {name}": text for name, text in self.planned.items()},
            **({"Devices": used} if (used := self.devices.in_words(self.result.gate.difference)) else {}),
            "Samples": self.sample_states,
        }


def run_html(facts: RunFacts, plots: Path) -> str:
    """`report.html`, without JavaScript; the PNG files in the folder `plots` are put into it."""
    result = facts.result
    pictures = {plot.name: plot for plot in embedded(plots)}
    return render(
        FOLDER / "run_page.html.jinja",
        facts=facts,
        written=f"{facts.written:%Y-%m-%d %H:%M %Z}".strip(),
        answer=answer(result),
        judged=text_of(result),
        meaning=meaning(facts.target, result, facts.draft, facts.is_served),
        acceptance=acceptance_tables(result),
        findings=findings(result) | suite_findings(result),
        differences=[
            {
                "kind": "tie" if place.tie else "mismatch",
                "token": str(place.position),
                "gap of logits": "one text ends" if place.gap is None else f"{place.gap:.2e}",
                "allowed for a tie": f"{place.delta:.2e}",
            }
            for place in result.lossless.divergences
        ],
        goodput=goodput_rows(result),
        plots=pictures,
        further_plots=[plot for name, plot in pictures.items() if name not in CAPTIONS],
        quarantined=_quarantined(facts.quarantined),
        source=redacted(facts.config.data.source),
        recipe=yaml.safe_dump(
            redacted(facts.config.model_dump(mode="json")), sort_keys=False, width=100, allow_unicode=True
        ),
    )


def run_markdown(facts: RunFacts, plots: Path | None = None) -> str:
    """The run in a page: for Prefect with the PNG files of `plots` inside it, or the note that MLflow shows.

    The note has neither pictures nor quarantined samples, because MLflow keeps 8,000 characters.
    """
    is_note = plots is None
    return render(
        FOLDER / "run_page.md.jinja",
        facts=facts,
        is_note=is_note,
        answer=answer(facts.result),
        meaning=meaning(facts.target, facts.result, facts.draft, facts.is_served),
        findings=facts.findings,
        plots=[] if is_note else list(embedded(plots)),
        quarantined=[] if is_note else _quarantined(facts.quarantined[:LISTED]),
        unlisted=max(0, len(facts.quarantined) - LISTED),
        **_tables(facts.result, GAP if is_note else ""),
    )


def _tables(result: BenchmarkResult, gap: str) -> dict[str, Any]:
    return {"acceptance": acceptance_tables(result), "goodput": goodput_rows(result), "gap": gap}


def _quarantined(samples: Sequence[Quarantined]) -> list[dict[str, str]]:
    return [
        {"epoch": str(lost.epoch), "ordinal": str(lost.ordinal), "sample": str(lost.sample), "last error": lost.error}
        for lost in samples
    ]


def version_markdown(target: TargetRecord, result: BenchmarkResult) -> str:
    """What a registered version is worth, whatever its alias may be later."""
    return render(
        FOLDER / "version.md.jinja",
        version_line=version_line(result),
        how_good=how_good(target, result),
        compared=compared(result),
        findings=findings(result),
        **_tables(result, GAP),
        held=result.conditions,
    )


def version_line(result: BenchmarkResult) -> str:
    """One line for lists of versions."""
    gate, lookup = result.gate, result.baselines_on(result.traffic)["prompt lookup"]
    return (
        f"{result.length:.2f} tokens per step, gate {'passed' if gate.passed else 'not passed'} against "
        f"{gate.against} ({signed(gate.difference)}), prompt lookup {lookup.length[result.conditions.lookahead]:.2f}"
    )


def embedded(plots: Path) -> Iterator[Plot]:
    """Every PNG of a folder as a data URI."""
    for file in sorted(plots.glob("*.png")):
        caption = CAPTIONS.get(file.stem, file.stem.replace("_", " "))
        uri = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
        yield Plot(file.stem, caption, uri)
