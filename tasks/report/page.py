"""Renders `report.html`, one self-contained file without JavaScript."""

import base64
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from infra.data_plane.bottleneck import in_words
from infra.quantities import byte_size, duration, figure, plural, signed
from infra.records.benchmark_text import acceptance_rows, findings, goodput_rows, sources, suite_findings
from infra.records.data_path import SamplesRecord
from infra.redaction import redacted
from tasks.report.facts import RunFacts, generators_in_words
from tasks.report.words import meaning

TEMPLATE = "report_page.html.jinja"
CAPTIONS = {
    "acceptance_by_position": "Acceptance rate at each position of the proposed tokens, given that all before it "
    "were accepted. Where a curve ends, fewer than 20 tokens were offered.",
    "heldout": "Acceptance length while training: on held-out prompts by the simulated walk, and on the training text.",
    "goodput": "Predicted tokens per second by lookahead, relative to the target alone, one curve for each number of "
    "texts decoded at once; the best lookahead of each is marked.",
    "samples": "Training samples by length, by supervised tokens and, of conversations, by the assistant's turns.",
    "training": "Loss and acceptance rate at each position during training, over the tokens trained on.",
}


class VerdictTile(NamedTuple):
    """One tile at the top of the page: what was judged, the result, and its figures."""

    label: str
    value: str
    note: str
    state: str = "plain"
    """`good`, `bad` or `plain`."""


class Plot(NamedTuple):
    """A picture inside the page."""

    name: str
    caption: str
    uri: str


Facts = list[tuple[str, str]]


def render(facts: RunFacts, plots: Path) -> str:
    """The whole page; `plots` is the folder whose PNG files are put into it."""
    recipe = yaml.safe_dump(_settings(facts), sort_keys=False, width=100, allow_unicode=True)
    by_name = {plot.name: plot for plot in embedded(plots)}
    return _template().render(
        facts=facts,
        method=facts.config.draft.title,
        written=f"{facts.written:%Y-%m-%d %H:%M %Z}".strip(),
        verdicts=list(verdicts(facts)),
        meaning=[_prose(words) for words in meaning(facts.target.name, facts.result, facts.draft)],
        table=acceptance_table(facts),
        goodput=goodput_rows(facts.result),
        findings=findings(facts.result) | suite_findings(facts.result),
        lookaheads=sorted(facts.result.simulated.length),
        plots=by_name,
        further_plots=[plot for name, plot in by_name.items() if name not in CAPTIONS],
        training=training(facts),
        bottleneck=sentence(in_words(facts.trained.rates)),
        data=data(facts),
        sample_states=sample_states(facts),
        conditions=conditions(facts),
        recipe=recipe,
    )


@cache
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    return environment.get_template(TEMPLATE)


def _settings(facts: RunFacts) -> dict[str, Any]:
    return redacted(facts.config.model_dump(mode="json"))


def _prose(words: str) -> Markup:
    """Escaped, with the commands between backticks set as code."""
    parts = [escape(part) for part in words.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts))


def embedded(plots: Path) -> Iterator[Plot]:
    """Every PNG of a folder as a data URI."""
    for file in sorted(plots.glob("*.png")):
        caption = CAPTIONS.get(file.stem, file.stem.replace("_", " "))
        uri = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
        yield Plot(file.stem, caption, uri)


def verdicts(facts: RunFacts) -> Iterator[VerdictTile]:
    """The run at a glance."""
    result, draft, gate = facts.result, facts.draft, facts.result.gate
    at = result.conditions.lookahead
    ours = result.simulated.length[at]
    yield VerdictTile("Acceptance length", f"{ours:.2f}", f"tokens per verification step at lookahead {at}")
    for name, baseline in result.baselines.items():
        wins = name not in result.unbeaten
        note = f"{ours:.2f} against {baseline.length[at]:.2f} on the same texts"
        yield VerdictTile(
            name[0].upper() + name[1:], "beaten" if wins else "not beaten", note, "good" if wins else "bad"
        )
    note = f"{signed(gate.difference)} against {gate.against}, at least {signed(gate.lower_bound)}"
    state = "good" if gate.passed else "bad"
    yield VerdictTile("Gate", "passed" if gate.passed else "not passed", note, state)
    yield VerdictTile("Registry", f"version {draft.version}", f"{draft.name}, {', '.join(draft.aliases) or 'no alias'}")


def acceptance_table(facts: RunFacts) -> list[dict[str, Any]]:
    """One row per source: its name, its acceptance lengths in the order of lookaheads, and how much was measured."""
    at, table = facts.result.conditions.lookahead, []
    for row, acceptance in zip(acceptance_rows(facts.result), sources(facts.result).values(), strict=True):
        name, *lengths = row.values()
        steps = f"{acceptance.steps[at]:,}" if at in acceptance.steps else ""
        table.append({"name": name, "lengths": lengths, "steps": steps, "texts": acceptance.conversations})
    return table


def training(facts: RunFacts) -> Facts:
    """What was trained."""
    trained = facts.trained
    wait = trained.data_wait_s / trained.step_s if trained.step_s else 0.0
    speed = figure(trained.tokens / trained.step_s) if trained.step_s else "unknown"
    by_position = ", ".join(f"{value:.2f}" for value in trained.acceptance_by_position)
    return [
        ("Tokens trained on", f"{trained.tokens:,}"),
        ("Optimizer steps", f"{trained.steps:,}"),
        ("Epochs", f"{facts.config.training.epochs:,}"),
        ("Time", duration(trained.wall_s)),
        ("Speed", f"{speed} tokens/s"),
        ("Waiting for data", f"{duration(trained.data_wait_s)} ({wait:.1%})"),
        ("Pause for a checkpoint", f"{1000 * trained.checkpoint_stall_s:.0f} ms"),
        *([("GPU memory of a rank, at most", byte_size(trained.peak_gpu_bytes))] if trained.peak_gpu_bytes else []),
        ("Processes", f"{generators_in_words(facts)}, {plural(trained.rates.ranks, 'rank')}"),
        ("Final loss", f"{trained.final_loss:.2f}"),
        ("Acceptance by position", by_position),
        ("Draft vocabulary holds", vocabulary(facts)),
        *((f"Plan, {name}", sentence(text)) for name, text in facts.planned),
    ]


def vocabulary(facts: RunFacts) -> str:
    """How much of the text, of the target's own choices and of its probability a draft can express."""
    shares = {
        "of the supervised tokens": facts.trained.token_coverage,
        "of the positions trained on": facts.trained.vocabulary_coverage,
        "of the target's probability": facts.result.vocabulary_mass,
    }
    return ", ".join(f"{value:.1%} {of}" for of, value in shares.items() if value is not None)


def data(facts: RunFacts) -> Facts:
    """What it was trained on."""
    samples = facts.samples
    return [
        ("Source", redacted(facts.config.data.source)),
        ("Training samples", f"{samples.train_samples:,}"),
        ("Training tokens", f"{samples.train_tokens:,} per epoch"),
        ("Held-out samples", f"{samples.heldout_samples:,}"),
        ("Longest sample", plural(samples.longest, "token")),
        ("Supervised", f"{samples.supervised_share:.1%} of the tokens"),
        ("Too short or too long", f"{samples.dropped:,}"),
        ("Truncated", f"{samples.truncated:,}"),
        ("Documents split", f"{samples.split:,}"),
        ("Duplicates left out", f"{samples.duplicates:,}"),
        ("Nothing supervised", f"{samples.unusable:,}"),
        ("Refused by the chat template", f"{samples.refused:,}"),
        ("Benchmark prompts", benchmark_prompts(samples)),
        ("Reasoning", f"in {plural(samples.thinking, 'sample')}, data.thinking={facts.config.data.thinking}"),
        ("Source's revision", samples.source_revision or "none, it is no dataset of the Hub"),
        ("Dataset hash", samples.dataset_hash),
    ]


def benchmark_prompts(samples: SamplesRecord) -> str:
    """What was left out because a benchmark asks it."""
    if not samples.compared_prompts:
        return "none were given to look for"
    found = plural(samples.benchmark_prompts, "document")
    return f"{found} left out that hold one of {samples.compared_prompts:,}, exactly or nearly"


def sample_states(facts: RunFacts) -> str:
    """One sentence on the final states of all samples."""
    progress = facts.progress
    rest = progress.total - progress.consumed - progress.quarantined
    words = [f"{progress.consumed:,} of {plural(progress.total, 'sample')} trained on"]
    words.append(f"{progress.quarantined or 'none'} quarantined")
    if progress.attempts:
        words.append(plural(progress.attempts, "capture failure"))
    if rest:
        words.append(f"{rest:,} not reached")
    return f"{', '.join(words)}."


def conditions(facts: RunFacts) -> Facts:
    """Everything that the acceptance numbers depend on."""
    return [(name.replace("_", " "), _text(value)) for name, value in facts.result.conditions.model_dump().items()]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {version}" for key, version in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def sentence(words: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."
