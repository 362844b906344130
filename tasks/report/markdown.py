"""The report as Markdown, for Prefect's page and MLflow's descriptions."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.data_plane.bottleneck import in_words
from infra.markdown import SPECIAL, escaped, markdown_table
from infra.quantities import plural, signed
from infra.records.acceptance import BenchmarkResult
from infra.records.benchmark_text import acceptance_rows, findings, goodput_rows
from infra.records.data_path import TargetRecord
from tasks.report.facts import Link, RunFacts
from tasks.report.page import embedded, sample_states
from tasks.report.words import compared, how_good, meaning

GAP = "&emsp;"
"""MLflow shows a table without any space between its cells."""
LISTED = 50
"""Quarantined samples shown in Prefect; the rest are in report.html."""


def run_note(facts: RunFacts) -> str:
    """The run in short, for MLflow, which keeps 8,000 characters."""
    return "\n\n".join([*_top(facts, GAP), *_more(facts)]) + "\n"


def run_page(facts: RunFacts, plots: Path) -> str:
    """The run in a page, for Prefect, with the PNG files of `plots` inside it."""
    pictures = [f"![{escaped(plot.caption)}]({plot.uri})" for plot in embedded(plots)]
    return "\n\n".join([f"# {escaped(facts.run)}", *_top(facts), *pictures, *_quarantined(facts), *_more(facts)]) + "\n"


def _top(facts: RunFacts, gap: str = "") -> list[str]:
    return [
        f"**{headline(facts)}**",
        *(_prose(words) for words in meaning(facts.target.name, facts.result, facts.draft)),
        "### Acceptance length by lookahead",
        markdown_table(acceptance_rows(facts.result), gap),
        *_serving(facts.result, gap),
        _topics(_findings(facts)),
    ]


def _serving(result: BenchmarkResult, gap: str) -> list[str]:
    """What to serve the draft with."""
    rows = goodput_rows(result)
    return ["### Goodput by load", markdown_table(rows, gap)] if rows else []


def headline(facts: RunFacts) -> str:
    """The verdict in one line."""
    result, at = facts.result, facts.result.conditions.lookahead
    return escaped(
        f"Acceptance length {result.simulated.length[at]:.2f} (prompt lookup "
        f"{result.prompt_lookup.length[at]:.2f}), gate {'passed' if result.gate.passed else 'not passed'}, version "
        f"{facts.draft.version} of {facts.draft.name} ({', '.join(facts.draft.aliases) or 'no alias'})"
    )


def version_markdown(target: TargetRecord, result: BenchmarkResult) -> str:
    """What a registered version is worth, whatever its alias may be later."""
    return "\n\n".join(
        [
            escaped(version_line(result)) + ".",
            _prose(how_good(target.name, result)),
            _prose(compared(result)),
            markdown_table(acceptance_rows(result), GAP),
            *_serving(result, GAP),
            _topics(findings(result)),
            _conditions(result),
        ]
    )


def draft_markdown(target: TargetRecord) -> str:
    """What all versions of a registered draft are."""
    return (
        f"Drafts for speculative decoding of **{escaped(target.name)}**, made by Draftsmith. The alias `champion` is "
        "the version that serving takes; `challenger` is the newest that has not earned that. Each version's "
        "description says what it accepts, under which conditions, and what the gate decided."
    )


def version_line(result: BenchmarkResult) -> str:
    """One line for lists of versions."""
    at, gate = result.conditions.lookahead, result.gate
    return (
        f"{result.simulated.length[at]:.2f} tokens per step, gate {'passed' if gate.passed else 'not passed'} "
        f"against {gate.against} ({signed(gate.difference)}), prompt lookup {result.prompt_lookup.length[at]:.2f}"
    )


def _conditions(result: BenchmarkResult) -> str:
    held = result.conditions
    return "Conditions: " + escaped(
        f"{held.prompts} prompts of up to {held.prompt_tokens} tokens, {held.max_new_tokens} new tokens, temperature "
        f"{held.temperature:g}, lookahead {held.lookahead}, topk {held.topk}, concurrency {held.concurrency}, "
        f"{held.engine} in {held.dtype}, {held.hardware}; template {held.template_hash}, thinking "
        f"{'on' if held.thinking else 'off'}, data {held.dataset_hash[:12]}, target {held.target} at "
        f"{held.target_revision[:12]}."
    )


def _findings(facts: RunFacts) -> dict[str, str]:
    trained = f"{plural(facts.trained.steps, 'step')} on {plural(facts.trained.tokens, 'token')}"
    return {
        **findings(facts.result),
        "Trained": f"{trained}; {in_words(facts.trained.rates)}",
        **{f"Plan, {name}": text for name, text in facts.planned},
        "Samples": sample_states(facts),
    }


def _quarantined(facts: RunFacts) -> list[str]:
    if not facts.quarantined:
        return []
    rows = [
        {"epoch": str(lost.epoch), "ordinal": str(lost.ordinal), "sample": str(lost.sample), "error": lost.error}
        for lost in facts.quarantined[:LISTED]
    ]
    rest = len(facts.quarantined) - LISTED
    return ["### Quarantined samples", markdown_table(rows), *([f"and {rest} more in report.html"] if rest > 0 else [])]


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _topics(facts: Mapping[str, str]) -> str:
    return _list(f"{escaped(topic)}: {escaped(text)}" for topic, text in facts.items())


def _more(facts: RunFacts) -> list[str]:
    """Links that lead somewhere from here: not those into the run folder."""
    return ["### More", _list(_link(link) for link in facts.links if link.is_anywhere)]


def _link(link: Link) -> str:
    shown = f"[{escaped(link.text)}]({link.href})" if link.href else f"`{link.text}`"
    return f"{escaped(link.name)}: {shown}"


def _prose(words: str) -> str:
    """Escaped, but for the commands between backticks."""
    parts = words.split("`")
    return "`".join(part if at % 2 else SPECIAL.sub(r"\\\1", part) for at, part in enumerate(parts))


def artifact_key(kind: str, name: str) -> str:
    """Key of the artifact `kind` of a draft or recipe. Prefect accepts lower-case letters, digits and dashes."""
    return f"{kind}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
