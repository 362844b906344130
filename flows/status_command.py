"""`draftsmith status`: where a run's samples are, its speed, and which side is slow."""

import json
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.files.lines import last_object
from infra.files.run_folder import RunFolder, newest_runs, no_run
from infra.quantities import duration, plural
from infra.redaction import redacted
from infra.refusal import Refusal, first_line
from infra.settings import check_home_folder, runs_folder
from infra.terminal import visible

if TYPE_CHECKING:
    from rich.table import Table

    from infra.ledger.ledger import Ledger
    from infra.records.data_path import SampleProgress
    from models.config.recipe import RunConfig

STATES = ("consumed", "taken", "ready", "leased", "pending", "quarantined")
ENDED = ("consumed", "quarantined")
"""States in which the training leaves samples; with `training.max_steps` it does not reach the others."""
QUIET_S = 60.0
"""A running trainer without a progress line for this long may be stuck."""
REGISTRY_S = 5.0
"""MLflow is not waited for longer."""
LISTED = 10
BAR = 40
WATCH_S = 2.0


def status(
    run: Annotated[str | None, typer.Argument(help="Name or folder of a run. Default: the newest.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", metavar="", help="Go on showing it until the run ends, or Ctrl-C.")
    ] = False,
) -> None:
    """Show where the samples of a run are, its speed, and which side is slow."""
    from rich.console import Console
    from rich.live import Live

    from infra.run.ownership import is_owned
    from models.config.recipe import read_config

    folder = RunFolder(find_run(run))
    config = read_config(folder.config)
    console = Console(highlight=False, markup=False)
    if not watch:
        console.print(_page(folder, config))
        return
    with suppress(KeyboardInterrupt), Live(_page(folder, config), console=console, auto_refresh=False) as shown:
        owned = True
        while owned:
            owned = is_owned(folder, wait_s=0)
            shown.update(_page(folder, config), refresh=True)
            time.sleep(WATCH_S if owned else 0)


def _page(folder: RunFolder, config: "RunConfig") -> "Table":
    """All lines. Raises Refusal for a ledger that is damaged or away."""
    from rich.table import Table
    from sqlalchemy.exc import SQLAlchemyError

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")  # a path is broken, not cut
    try:
        for name, text in describe(folder, config):
            table.add_row(name, visible(redacted(text)))
    except (SQLAlchemyError, sqlite3.DatabaseError, Refusal) as error:
        where, why = config.ledger.url or folder.ledger_file, first_line(error)
        told = f"the ledger {where} is damaged or does not answer ({why}): restore it, or try again"
        refusal = error if isinstance(error, Refusal) else Refusal(told)
        if not folder.failure.is_file():
            raise refusal from error
        table.add_row("ledger", visible(str(refusal)))  # perhaps why the run failed, which is shown above
    return table


def find_run(run: str | None) -> Path:
    """The run's folder. Raises Refusal if there is none."""
    if run is None:
        runs = newest_runs(runs_folder())
        if not runs:
            raise Refusal(f"no runs in {runs_folder()}: start one with `draftsmith retrain RECIPE`")
        return runs[0].path
    for folder in (Path(run).absolute(), runs_folder() / run):
        if os.path.isfile(folder / "config.json"):  # pathlib's raises for a name that no file can have
            return folder
    raise no_run(run, runs_folder())


def describe(folder: RunFolder, config: "RunConfig") -> Iterator[tuple[str, str]]:
    """Name and text of every line."""
    from infra.ledger.ledger import Ledger
    from infra.run.ownership import is_owned

    owned = is_owned(folder, wait_s=0)
    stage = stage_of(folder)
    yield "run", folder.name
    yield "state", _state(folder, stage, owned)
    if stage == "finished":
        yield from _readable("draft", _verdict(folder))
    elif not owned and folder.failure.is_file():
        yield "error", folder.failure.read_text(errors="replace").strip()
    if config.ledger.url or folder.ledger_file.is_file():
        with Ledger.open(config.ledger.url or folder.ledger_url, folder.name) as ledger:
            yield from _samples(ledger, folder, owned)
            if last := last_object(folder.metrics):
                yield from _readable("training", _training(folder, config, last))
                yield from _readable("bottleneck", _bottleneck(folder, last))
            yield from _readable("generators", _generators(folder, config))
            if owned and stage == "training" and (quiet := _quiet_s(folder, ledger)) > QUIET_S:
                from infra.data_plane.watch import blame

                yield "stalled?", f"nothing moved for {quiet:.0f} s: {blame(ledger)}"
    yield "files", str(folder.path)


def _readable(name: str, lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The lines; the rest is one line that says why where their file is missing, damaged or of another version."""
    try:
        yield from lines
    except KeyError as error:
        yield name, f"not shown: written without {error} by another version of Draftsmith"
    except (OSError, ValueError, TypeError) as error:
        yield name, f"not shown: {first_line(error)}"


def stage_of(folder: RunFolder) -> str:
    """What the run is at, told by the files that are there."""
    stages = (
        (folder.target, "preparing the target"),
        (folder.samples, "preparing the samples"),
        (folder.training, "training"),
        (folder.path / "export.json", "exporting"),
        (folder.benchmark, "benchmarking"),
        (folder.report, "registering"),
    )
    return next((stage for file, stage in stages if not file.is_file()), "finished")


def _state(folder: RunFolder, stage: str, owned: bool) -> str:
    if stage == "finished" or owned:
        return stage
    if not folder.config.is_file():
        return "removed"
    again = f"draftsmith retrain --resume {_as_argument(folder)}"
    if folder.failure.is_file():
        return f"failed while {stage}; once the cause is gone, resume it with: {again}"
    return f"interrupted while {stage}; resume it with: {again}"


def _as_argument(folder: RunFolder) -> str:
    """The run's name if that is enough to find it, else its path."""
    return shlex.quote(folder.name if folder.path == runs_folder() / folder.name else str(folder.path))


def _verdict(folder: RunFolder) -> Iterator[tuple[str, str]]:
    from infra.records.acceptance import BenchmarkResult
    from infra.records.benchmark_text import text_of
    from tasks.report.meaning import answer

    result: BenchmarkResult = BenchmarkResult.read(folder.benchmark)
    draft = json.loads(folder.report.read_text())["draft"]
    alias = _alias(folder, draft["name"], draft["version"])
    named = f"version {draft['version']} of {draft['name']}" + (f" ({alias})" if alias else "")
    at = result.conditions.lookahead
    yield "draft", f"{named}, acceptance length {result.length:.2f} at lookahead {at} on {text_of(result)}"
    yield "gate", answer(result)
    yield "report", str(folder.report_page)


def _alias(folder: RunFolder, draft: str, version: int) -> str:
    """The version's present aliases in the run's MLflow, which may have changed since the run ended."""
    check_home_folder()
    from infra.tracking.client import REGISTRY_ERRORS, give_up_soon, why_silent
    from infra.tracking.registry import list_drafts
    from infra.tracking.runs import TrackedRun

    try:
        uri = TrackedRun.read(folder.tracking).uri
    except (FileNotFoundError, Refusal):
        return f"{folder.tracking} is missing or damaged: what serves is not known"
    silent = f"MLflow at {uri} does not answer: what serves is not known"
    file = Path(uri.removeprefix("sqlite:///"))
    if why_silent(uri, REGISTRY_S) if uri.startswith("http") else uri.startswith("sqlite") and not file.is_file():
        return silent
    give_up_soon()
    try:
        found = [one for one in list_drafts(uri, draft) if one.version == version]
        if not found:
            return "no longer registered"
        return ", ".join(found[0].aliases) or _decided(uri, draft, version)
    except REGISTRY_ERRORS:
        return silent


def _decided(uri: str, draft: str, version: int) -> str:
    """The last decision about a version without an alias."""
    from infra.tracking.registry import history

    decisions = [one for one in history(uri, draft) if one.version == version]
    if not decisions or decisions[-1].outcome == "promoted":
        return "does not serve any more" if decisions else "does not serve"
    last = decisions[-1]
    return last.outcome + (f" by {last.by}" if last.by else "") + (f": {last.reason}" if last.reason else "")


def _samples(ledger: "Ledger", folder: RunFolder, owned: bool) -> Iterator[tuple[str, str]]:
    """Where they are; once the training has ended, the store is gone, and so is all that was on its way."""
    states = ledger.progress()
    if not states.total:
        yield "samples", "none in the ledger yet"
        return
    ended = folder.training.is_file()
    counts = {state: getattr(states, state) for state in (ENDED if ended else STATES)}
    if ended:
        counts["not reached"] = states.total - sum(counts.values())
    told = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    yield "samples", f"{_bar(states, ended)} {states.total:,}: {told}"
    if folder.sharing.is_file():
        yield from _readable("on their way", _on_their_way(ledger, folder, states.bytes_held, owned and not ended))
    if states.attempts:
        yield "failures", plural(states.attempts, "capture failure")
    bad = ledger.quarantined()
    for sample in bad[:LISTED]:
        yield "quarantined", f"epoch {sample.epoch} ordinal {sample.ordinal} (sample {sample.sample}): {sample.error}"
    if len(bad) > LISTED:
        yield "", f"and {len(bad) - LISTED} more"


def _on_their_way(ledger: "Ledger", folder: RunFolder, nbytes: int, moving: bool) -> Iterator[tuple[str, str]]:
    from infra.ledger.rounds import trainer_has_turn
    from infra.records.sharing import read_sharing

    sharing = read_sharing(folder)
    if sharing.mode == "alternate":
        yield "turn", "training" if trainer_has_turn(ledger) else "capture"
    if moving:
        held, budget = nbytes / 2**20, sharing.budget_bytes / 2**20
        yield "on their way", f"{held:.0f} of {budget:.0f} MiB between capture and training"


def _bar(states: "SampleProgress", ended: bool) -> str:
    done = round(BAR * (states.consumed + states.quarantined) / states.total)
    moving = 0 if ended else round(BAR * (states.taken + states.ready + states.leased) / states.total)
    return "█" * done + "▒" * min(moving, BAR - done) + "░" * max(0, BAR - done - moving)


def _training(folder: RunFolder, config: "RunConfig", last: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from infra.records.data_path import SamplesRecord

    samples: SamplesRecord = SamplesRecord.read(folder.samples)
    total = config.training.total_steps(samples.train_samples)
    rates = " ".join(f"{rate:.2f}" for rate in last["acceptance_by_position"])
    left = (total - last["step"]) * last["seconds"] / last["step"]
    rest = f", about {duration(left)} left" if last["step"] < total else ""
    yield (
        "training",
        f"step {last['step']:,} of {total:,}, loss {last['loss']:.3f}, acceptance by position {rates}, "
        f"{last['tokens_per_s']:,.0f} tokens/s{rest}",
    )


def _bottleneck(folder: RunFolder, last: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from infra.data_plane.bottleneck import in_words
    from infra.planner.plan import comparison, read_plan
    from infra.records.data_path import SideRates

    rates = SideRates.model_validate(last["rates"])
    yield "bottleneck", in_words(rates)
    if plan := read_plan(folder.plan):
        for name, text in comparison(plan, rates).items():
            yield f"plan, {name}", text
    elif folder.plan.is_file():
        yield "plan", f"not compared: {folder.plan} is damaged, or of another version of Draftsmith"


def _generators(folder: RunFolder, config: "RunConfig") -> Iterator[tuple[str, str]]:
    from infra.records.data_path import generators_changes

    if changes := generators_changes(folder.generators):
        last, most = changes[-1], config.generator.most
        bounds = f" of at most {most}" if most > config.generator.count else ""
        yield "generators", f"{last.generators}{bounds}; {last.why}"


def _quiet_s(folder: RunFolder, ledger: "Ledger") -> float:
    """Seconds since a sample was last captured or a step last reported."""
    reported = time.time() - folder.metrics.stat().st_mtime if folder.metrics.is_file() else None
    captured = ledger.last_capture()
    return min((since for since in (reported, captured and captured.ago_s) if since is not None), default=0.0)
