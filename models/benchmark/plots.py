"""Plots of a benchmark, of training progress and of the training samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from infra.files.lines import read_objects
from infra.records.acceptance import Acceptance, BenchmarkResult
from infra.records.benchmark_text import text_of
from infra.records.data_path import HELDOUT_LENGTH, HELDOUT_SEEN, MoreData, SamplesRecord

mpl.use("Agg")

SIZE = (7.0, 4.2)
COUNT = StrMethodFormatter("{x:,.0f}")
POINTS = 200
LONG_MIN = 180.0
LEAST_OFFERED = 20
"""A rate of fewer trials says nothing."""


@contextmanager
def _saved(path: Path, columns: int) -> Iterator[Axes]:
    """A figure with one plot, a grid, and a legend of `columns` columns below the plot."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    yield axes
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
    axes.grid(alpha=0.3)
    for line in (line for one in figure.axes for line in one.lines):
        if np.size(line.get_xdata()) == 1 and line.get_marker() == "None":  # a line through one point is none
            line.set_marker("o")
    _save(figure, path)


def averaged(values: Sequence[float]) -> list[float]:
    """Means of neighbours, `POINTS` at most: the scatter of thousands of steps would hide the curve."""
    size = max(1, -(-len(values) // POINTS))
    return [fmean(values[first : first + size]) for first in range(0, len(values), size)]


def plot_by_position(result: BenchmarkResult, path: Path) -> None:
    """Acceptance rate at each position, given that all before it were accepted."""
    other = "sampled" if result.traffic == "greedy" else "greedy"
    shown: list[tuple[str, Acceptance | None, str]] = [
        ("draft", result.draft_on(result.traffic), "C0-o"),
        ("champion", result.champion_on(result.traffic), "C2-o"),
        (f"draft, {text_of(result, other)}", result.draft_on(other), "C0--o"),
    ]
    styles = ("C1-s", "C3-^", "C4-v", "C5-d")
    shown += [
        (name, of, style)
        for (name, of), style in zip(result.baselines_on(result.traffic).items(), styles, strict=False)
    ]
    at = result.conditions.lookahead
    with _saved(path, columns=3) as axes:
        for label, acceptance, style in shown:
            if acceptance is not None:
                rates = well_supported(acceptance)
                axes.plot(range(1, len(rates) + 1), rates, style, label=label, markersize=4)
        axes.set(
            xlabel=f"position of the draft token (shown where it was offered at least {LEAST_OFFERED} times)",
            ylabel="acceptance rate, given all before",
            ylim=(0, 1),
            title=f"{result.length:.2f} tokens per step at lookahead {at}\nover {text_of(result)}",
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes.get_xlim()[1] < 2:  # one position
            axes.set(xlim=(0.5, 1.5), xticks=[1])


def well_supported(acceptance: Acceptance) -> list[float]:
    """Rates by position, from the first on, as long as a position was offered often enough."""
    offered, rates = float(acceptance.steps[max(acceptance.steps)]), []
    for rate in acceptance.by_position:
        if rate is None or round(offered) < LEAST_OFFERED:
            break
        rates.append(rate)
        offered *= rate
    return rates


def plot_goodput(result: BenchmarkResult, path: Path) -> None:
    """Predicted tokens per second against the target alone, by lookahead, one curve per load, if it was measured.

    The best lookahead of each load is marked; the champion's curves are dashed.
    """
    found = result.goodput
    if found is None:
        return
    with _saved(path, columns=3) as axes:
        for name, table, line, alpha in (("draft", found.draft, "-", 0.9), ("champion", found.champion, "--", 0.5)):
            if table is None:
                continue
            for place, (batch, best) in enumerate(table.best.items()):
                plain = table.plain_at(batch).tokens_per_s
                faster = {row.lookahead: row.tokens_per_s / plain for row in table.rows if row.batch == batch}
                label = f"{name}, {batch} at once"
                axes.plot(list(faster), list(faster.values()), f"C{place}{line}", alpha=alpha, label=label)
                axes.plot(best, faster[best], f"C{place}o", alpha=alpha)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(
            xlabel="lookahead (0: the target alone)",
            ylabel="goodput / the target's alone",
            title="Predicted goodput, best lookahead marked",
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_training(metrics: Path, path: Path) -> None:
    """Loss, and acceptance at each position as training sees it, over tokens trained on."""
    rows = read_objects(metrics)
    tokens = averaged([row["tokens"] for row in rows])
    with _saved(path, columns=4) as left:
        left.plot(tokens, averaged([row["loss"] for row in rows]), "k-", label="loss")
        left.set(xlabel="tokens", ylabel="loss", title="Training")
        left.xaxis.set_major_formatter(COUNT)
        right = left.twinx()
        for place, rates in enumerate(zip(*(row["acceptance_by_position"] for row in rows), strict=True)):
            right.plot(tokens, averaged(rates), f"C{place}-", alpha=0.8, label=f"acceptance at {place + 1}")
        right.set(ylabel="acceptance rate, given all before", ylim=(0, 1))


def plot_heldout(metrics: Path, path: Path, more: MoreData | None = None) -> None:
    """Acceptance length on held-out text and of the training, if it was measured; and what `more` data would bring."""
    rows = read_objects(metrics)
    measured = [row for row in rows if HELDOUT_LENGTH in row]
    if not measured:
        return
    own = [1.0 + sum(accumulate(row["acceptance_by_position"], mul)) for row in rows]
    lengths = [row[HELDOUT_LENGTH] for row in measured]
    with _saved(path, columns=2) as axes:
        axes.plot(
            averaged([row["step"] for row in rows]),
            averaged(own),
            "C7-",
            alpha=0.7,
            label="training text, text's own tokens",
        )
        axes.plot([row["step"] for row in measured], lengths, "C0-o", label="held-out prompts, simulated walk")
        seen = [row for row in measured if HELDOUT_SEEN in row]
        if seen:
            axes.plot([row["step"] for row in seen], [row[HELDOUT_SEEN] for row in seen], "C2-s", label="after images")
        if more is not None and more.lower is not None and more.upper is not None:
            place, ends = 2 * rows[-1]["step"], [lengths[-1] + more.lower, lengths[-1] + more.upper]
            axes.plot([place, place], ends, "C0_-", label="twice the data, 90 % confidence")
        axes.set(xlabel="step", ylabel="tokens per verification step", title="Acceptance length while training")
        axes.xaxis.set_major_formatter(COUNT)


def plot_timeline(metrics: Path, path: Path) -> None:
    """Who waited for whom: the trainer for data, and generators for the trainer, if that was recorded."""
    rows = [row for row in read_objects(metrics) if "seconds" in row and row.get("rates", {}).get("inference")]
    if not rows:
        return
    minutes = averaged([row["seconds"] / 60 for row in rows])
    unit, times = ("minutes", minutes) if minutes[-1] < LONG_MIN else ("hours", [one / 60 for one in minutes])
    idle = [max(0.0, 1 - row["tokens_per_s"] / row["rates"]["inference"]) for row in rows]
    with _saved(path, columns=2) as axes:
        axes.plot(times, averaged([row["data_wait_share"] for row in rows]), "C0-", label="trainer waits for data")
        axes.plot(times, averaged(idle), "C1-", label="generators wait for the trainer")
        axes.set(xlabel=f"{unit} of training", ylabel="share of the time", ylim=(0, 1), title="Who waited for whom")


def plot_samples(samples: SamplesRecord, path: Path) -> Path | None:
    """Lengths of the training samples, their supervised share, and their turns; None if not recorded."""
    shown = {
        "tokens of a sample": samples.lengths,
        "supervised tokens": samples.supervised,
        "assistant's turns": samples.turns,
    }
    drawn = {label: histogram for label, histogram in shown.items() if histogram is not None}
    if not drawn:
        return None
    figure = Figure(figsize=(SIZE[0], 2.4), layout="constrained")
    for axes, (label, histogram) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        edges = [histogram.first + histogram.width * place for place in range(len(histogram.counts))]
        # Whole numbers stand in the middle of their bar.
        shift = -0.5 if histogram.width == 1 else 0.0
        axes.bar([edge + shift for edge in edges], histogram.counts, histogram.width, align="edge", edgecolor="white")
        axes.set(xlabel=label, ylabel="samples" if axes.get_subplotspec().is_first_col() else None)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(COUNT)
        axes.yaxis.set_major_formatter(COUNT)
        axes.grid(alpha=0.3, axis="y")
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
