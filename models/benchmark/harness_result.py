"""The result of `draftsmith bench` and how people see it: a table on the terminal, and a page that stands by itself."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from infra.records.acceptance import Conditions, GroupAcceptance
from infra.records.data_path import Record
from infra.templates import render

LEAST_DISTINCT = 0.3
"""Minimum share of distinct tokens; a more repetitive text is reported separately."""


class Speed(Record):
    """Decoding after the prefill at one batch size: medians over the repeats, with the slowest and fastest."""

    batch: int
    repeats: int
    acceptance_length: float
    """Acceptance length of the timed texts."""
    plain_tokens_per_s: float
    """The target alone, in the same loop."""
    plain_spread: tuple[float, float]
    tokens_per_s: float | None
    """None if the figure is impossible and therefore not published."""
    spread: tuple[float, float] | None
    speedup: float | None
    flagged: bool
    """The speed-up exceeded what the acceptance length allows."""

    def __str__(self) -> str:
        if self.speedup is None or self.tokens_per_s is None or self.spread is None:
            return f"{self.batch}: not published"
        low, high = self.spread
        return f"{self.batch}: {self.speedup:.2f}x, {self.tokens_per_s:.1f} ({low:.1f} to {high:.1f}) tokens/s"


class Cell(Record):
    """One source with one shape of proposals at one temperature on one suite, and under what conditions."""

    suite: str
    source: str
    shape: str
    """A lookahead, or a tree as on the command line."""
    conditions: Conditions
    length: float | None
    """Acceptance length over texts that are not repetitive; None without a complete step."""
    interval: tuple[float, float] | None
    """95 %, by jackknife over conversations; None for fewer than 2."""
    steps: int
    conversations: int
    by_position: tuple[float | None, ...]
    """Acceptance by position of a chain."""
    by_category: tuple[GroupAcceptance, ...]
    by_context: tuple[GroupAcceptance, ...]
    distinct_token_share: float
    """Share of distinct tokens over all texts."""
    repetitive: GroupAcceptance | None
    """Texts with a distinct-token share under `LEAST_DISTINCT`, which are in no other figure."""
    verified: int
    """Texts that were decoded for real. The counts of the others come from a walk over the target's own text."""
    same_counts: int | None
    """Texts of these whose counts equal the walk's; None where all were decoded."""
    mismatches: int | None
    """Mismatches of greedy text with the target's own; None if sampled."""
    ties: int | None
    speeds: tuple[Speed, ...]

    @property
    def is_served(self) -> bool:
        return self.conditions.engine != "transformers"

    @property
    def measured(self) -> dict[str, str]:
        """What was measured, by column."""
        source = f"{self.source} in {self.conditions.engine}" if self.is_served else self.source
        return {"source": source, "shape": self.shape, "T": f"{self.conditions.temperature:g}"}

    @property
    def row(self) -> dict[str, str]:
        """The figures, by column."""
        length = "no complete step" if self.length is None else f"{self.length:.2f}"
        if self.interval:
            length += f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})"
        return self.measured | {
            "acceptance length (95 %)": length,
            "steps": str(self.steps),
            "texts": str(self.conversations),
            "decoded for real": self.decoded,
            "speed-up by batch size": "; ".join(map(str, self.speeds)),
        }

    @property
    def decoded(self) -> str:
        """How much of it real decoding has shown."""
        if self.same_counts is None:
            return "all"
        return f"{self.verified}, {self.same_counts} with the same counts" if self.verified else "none"


class HarnessResult(Record):
    """What `draftsmith bench` writes."""

    commit: str
    date: str
    too_long: Mapping[str, int]
    """Questions left out because of their length, by suite."""
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    """What was asked for and not measured, and why."""
    wall_s: float

    @property
    def suites(self) -> dict[str, list[Cell]]:
        """The cells by suite."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.suite, []).append(cell)
        return found


def table(result: HarnessResult, suite: str) -> Table:
    """One suite, a row for every cell."""
    rows = [cell.row for cell in result.suites[suite]]
    shown = Table(*rows[0], title=suite)
    for row in rows:
        shown.add_row(*row.values())
    return shown


def page(result: HarnessResult) -> str:
    """All figures with their conditions, as Markdown."""
    said = list(lines(result))
    return render(
        Path(__file__).with_name("harness_page.md.jinja"),
        result=result,
        held=result.cells[0].conditions,
        is_served=any(cell.is_served for cell in result.cells),
        lines={name: [line for line in said if line.startswith((f"{name},", f"{name}:"))] for name in result.suites},
        groups={name: _groups(cells) for name, cells in result.suites.items()},
        **_conditions(result.cells),
    )


def _conditions(cells: Sequence[Cell]) -> dict[str, Any]:
    """What all cells share, and a row of what only some have for each cell that differs from the one before."""
    dumped = [
        cell.conditions.model_dump(mode="json", exclude={"versions", "temperature", "sampled_temperature"})
        for cell in cells
    ]
    shared = {name: value for name, value in dumped[0].items() if all(each[name] == value for each in dumped)}
    rows = [
        {"suite": cell.suite, **cell.measured, **{name: str(each[name]) for name in each if name not in shared}}
        for cell, each in zip(cells, dumped, strict=True)
    ]
    return {"shared": shared, "differing": rows}


def _groups(cells: Sequence[Cell]) -> dict[str, list[dict[str, str]]]:
    """Acceptance length by category and by prompt tokens, a column for each group, where there are several."""
    tables: dict[str, list[dict[str, str]]] = {}
    for what, groups in (
        ("category", [cell.by_category for cell in cells]),
        ("prompt tokens", [cell.by_context for cell in cells]),
    ):
        names = dict.fromkeys((part.group for of in groups for part in of), "")
        if len(names) > 1:
            tables[what] = [
                cell.measured | names | {part.group: f"{_length(part)} ({part.conversations})" for part in of}
                for cell, of in zip(cells, groups, strict=True)
            ]
    return tables


def lines(result: HarnessResult) -> Iterator[str]:
    """What the tables do not show."""
    for cell in result.cells:
        source, shape, temperature = cell.measured.values()
        what = f"{cell.suite}, {source} {shape}, T={temperature}"
        if cell.mismatches:
            yield f"{what}: NOT lossless, {cell.mismatches} mismatches with the target's own text"
        if cell.same_counts is not None and cell.same_counts < cell.verified:
            yield f"{what}: the walk's counts differ from real decoding's in {cell.verified - cell.same_counts} texts"
        if cell.ties:
            yield f"{what}: {cell.ties} ties between equally likely tokens"
        if cell.repetitive is not None:
            yield (
                f"{what}: {cell.repetitive.conversations} texts repeat themselves (distinct-token share under "
                f"{LEAST_DISTINCT}) and are left out: {_length(cell.repetitive)} there"
            )
        for speed in cell.speeds:
            if speed.flagged:
                yield (
                    f"{what}, batch {speed.batch}: the measured speed-up cannot come from an acceptance length of "
                    f"{speed.acceptance_length:.2f}; measure again on an idle machine, with more --timed-prompts"
                )
    for suite, left_out in result.too_long.items():
        if left_out:
            yield f"{suite}: {left_out} questions are longer than --prompt-tokens and left out"
    yield from result.notes


def _length(part: GroupAcceptance) -> str:
    return "no complete step" if part.length is None else f"{part.length:.2f}"
