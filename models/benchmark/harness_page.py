"""The result of `draftsmith bench` for people: a table on the terminal, and a Markdown page that stands by itself.

Runs in the process of `models.benchmark.standalone`.
"""

from collections.abc import Iterator, Sequence

from rich.table import Table

from infra.records.acceptance import GroupAcceptance
from models.benchmark.harness import LEAST_DISTINCT, Cell, HarnessResult, Speed

COLUMNS = ("source", "shape", "T", "acceptance length (95 %)", "steps", "texts", "speed-up by batch size")


def table(result: HarnessResult, suite: str) -> Table:
    """One suite, a row for every cell."""
    shown = Table(title=suite)
    for column in COLUMNS:
        shown.add_column(column)
    for cell in _of(result, suite):
        shown.add_row(*row(cell))
    return shown


def row(cell: Cell) -> list[str]:
    """A cell's row."""
    low, high = cell.interval or (0.0, 0.0)
    length = "no complete step" if cell.length is None else f"{cell.length:.2f} ({low:.2f} to {high:.2f})"
    speeds = "; ".join(_speed(each) for each in cell.speeds)
    temperature = f"{cell.conditions.temperature:g}"
    return [_source(cell), cell.shape, temperature, length, str(cell.steps), str(cell.conversations), speeds]


def _source(cell: Cell) -> str:
    return f"{cell.source} in {cell.conditions.engine}" if _served(cell) else cell.source


def _served(cell: Cell) -> bool:
    return cell.conditions.engine != "transformers"


def _speed(speed: Speed) -> str:
    if speed.speedup is None or speed.tokens_per_s is None or speed.spread is None:
        return f"{speed.batch}: not published"
    low, high = speed.spread
    return f"{speed.batch}: {speed.speedup:.2f}x, {speed.tokens_per_s:.1f} ({low:.1f} to {high:.1f}) tokens/s"


def page(result: HarnessResult) -> str:
    """All figures with their conditions, as Markdown."""
    return "\n".join(_page(result)) + "\n"


def lines(result: HarnessResult) -> Iterator[str]:
    """What the tables do not show."""
    for cell in result.cells:
        what = f"{cell.suite}, {_source(cell)} {cell.shape}, T={cell.conditions.temperature:g}"
        if cell.mismatches:
            yield f"{what}: NOT lossless, {cell.mismatches} mismatches with the target's own text"
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


def _page(result: HarnessResult) -> Iterator[str]:
    first = result.cells[0].conditions
    yield from (f"# Speculative decoding of {first.target}", "")
    yield (
        f"Commit {result.commit}, {result.date}, {result.wall_s:.0f} s. {first.hardware}, {first.threads} threads, "
        f"{first.engine} in {first.dtype}; {', '.join(f'{name} {number}' for name, number in first.versions.items())}."
    )
    yield ""
    yield (
        f"Target {first.target} at {first.target_revision}. At most {first.max_new_tokens} new tokens, prompts of at "
        f"most {first.prompt_tokens}. Acceptance length: tokens emitted after the prefill token / complete "
        "verification steps, with the 95 % bootstrap interval over texts. Speed: after the prefill, median of the "
        "repeats (slowest to fastest), against the target alone in the same loop at the same batch size."
    )
    if any(map(_served, result.cells)):
        yield ""
        yield (
            "In SGLang: a server for the target alone and one for the draft, with concurrent requests; acceptance is "
            "what the engine emits step by step. Speed there is with the prefill, of prompts that it has seen before."
        )
    for suite in dict.fromkeys(cell.suite for cell in result.cells):
        yield from _suite(result, suite)
    yield from ("", "## Conditions", "")
    for cell in result.cells:
        shown = cell.conditions.model_dump(mode="json", exclude={"versions"})
        yield f"- {cell.suite}, {_source(cell)} {cell.shape}: " + ", ".join(
            f"{key} {value}" for key, value in shown.items()
        )


def _suite(result: HarnessResult, suite: str) -> Iterator[str]:
    cells = _of(result, suite)
    yield from ("", f"## {suite}", "", f"Content {cells[0].conditions.dataset_hash}.", "")
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    yield from (f"| {' | '.join(row(cell))} |" for cell in cells)
    yield from _groups("category", cells, [cell.by_category for cell in cells])
    yield from _groups("prompt tokens", cells, [cell.by_context for cell in cells])
    said = [line for line in lines(result) if line.startswith((f"{suite},", f"{suite}:"))]
    yield from ("", *(f"- {line}" for line in said)) if said else ()


def _groups(what: str, cells: Sequence[Cell], groups: Sequence[Sequence[GroupAcceptance]]) -> Iterator[str]:
    """One column per category or range, if there are several."""
    names = list(dict.fromkeys(part.group for of in groups for part in of))
    if len(names) < 2:
        return
    yield from ("", f"By {what} (texts):", "")
    yield f"| source | shape | T | {' | '.join(names)} |"
    yield f"|---|---|---|{'---|' * len(names)}"
    for cell, of in zip(cells, groups, strict=True):
        known = {part.group: f"{_length(part)} ({part.conversations})" for part in of}
        shown = " | ".join(known.get(name, "") for name in names)
        yield f"| {_source(cell)} | {cell.shape} | {cell.conditions.temperature:g} | {shown} |"


def _of(result: HarnessResult, suite: str) -> list[Cell]:
    return [cell for cell in result.cells if cell.suite == suite]


def _length(part: GroupAcceptance) -> str:
    return "no complete step" if part.length is None else f"{part.length:.2f}"
