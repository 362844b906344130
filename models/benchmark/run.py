"""`python -m models.benchmark.run RUN`: benchmark of a run's exported draft on its held-out prompts.

Writes RUN/benchmark.json, RUN/gate.json, RUN/request_counts.json, RUN/plots/ and RUN/export/serving/, what engines are
told about the draft. One process, the target loaded once.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.records.acceptance import BenchmarkResult, GateEvidence, Ground, RequestCounts, ServedResult, SuiteResult
from infra.records.benchmark_text import acceptance_tables, findings, goodput_rows, suite_findings
from infra.records.data_path import TrainingResult
from infra.records.goodput import MeasuredGoodput
from infra.run.gpu_use import measured_use
from models.benchmark.after_images import GROUND, image_prompts, measure_after_images
from models.benchmark.best_trees import with_trees
from models.benchmark.categories import suite_result
from models.benchmark.conditions import Counter, conditions
from models.benchmark.confidence import confidence_fit
from models.benchmark.contestants import Contestants, load_contestants
from models.benchmark.counter import why_engine_counts
from models.benchmark.engine_counts import benchmark_in_engine
from models.benchmark.measure import WalkedTexts, at, logged_tokens, measure, measure_suite, walk_decoded
from models.benchmark.plots import (
    plot_by_position,
    plot_goodput,
    plot_heldout,
    plot_samples,
    plot_timeline,
    plot_training,
)
from models.benchmark.result import build_result, gather, ground, request_counts, with_loads
from models.benchmark.step_costs import measure_goodput
from models.data.media import Prompt
from models.data.prompts import heldout_prompts, suite_prompts
from models.decoding.acceptance import acceptance_length, distinct_token_share
from models.devices import leased_bytes
from models.dtypes import DTYPES
from models.export.card import write_card
from models.export.serving_settings import write_settings
from models.run import PreparedRun
from models.targets.recommended import left_out


def benchmark_run(run: PreparedRun, champion: Path | None, champion_label: str) -> BenchmarkResult:
    """Measure, judge, and write everything down. Raises Refusal for a run without export or enough prompts."""
    begun = time.perf_counter()
    if caveat := left_out(Path(run.target.path)):
        print(caveat, flush=True)
    if why := why_engine_counts(run, leased_bytes()):
        print(f"SGLang counts acceptance: {why}", flush=True)
        result, evidence, counts = benchmark_in_engine(run, champion, champion_label)
    else:
        result, evidence, counts = _by_reference(run, champion, champion_label)
    result = result.model_copy(update={"wall_s": time.perf_counter() - begun})
    # Before the result: a run that has benchmark.json is done with its benchmark.
    write_atomically(run.folder.request_counts, counts)
    write_atomically(run.folder.gate, evidence)
    write_settings(run, result.goodput)
    write_card(run, result)
    write_atomically(run.folder.benchmark, result)
    plot_by_position(result, run.folder.plots / "acceptance_by_position.png")
    plot_goodput(result, run.folder.plots / "goodput.png")
    plot_samples(run.samples, run.folder.plots / "samples.png")
    if run.folder.metrics.is_file():
        training = run.folder.training
        more = TrainingResult.read(training).more_data if training.is_file() else None
        plot_training(run.folder.metrics, run.folder.plots / "training.png")
        plot_heldout(run.folder.metrics, run.folder.plots / "heldout.png", more)
        plot_timeline(run.folder.metrics, run.folder.plots / "timeline.png")
    return result


def _by_reference(
    run: PreparedRun, champion: Path | None, champion_label: str
) -> tuple[BenchmarkResult, GateEvidence, RequestCounts]:
    config, promotion = run.config.benchmark, run.config.promotion
    prompts = heldout_prompts(run.open_samples("heldout"), run.config.benchmark)
    folders = [run.folder.export, champion] if champion else [run.folder.export]
    shown = image_prompts(run)
    contestants = load_contestants(Path(run.target.path), folders, DTYPES[run.config.benchmark_dtype], sees=bool(shown))
    logged = [] if config.suffix_log is None else logged_tokens(run.target, config.suffix_log)
    found = measure(contestants, config, prompts, run.config.seed, logged)
    walks = found.traffic(promotion.traffic.sampling).by_rule(config.sampled_proposals)
    goodput = None
    if config.loads:
        texts = found.traffic(promotion.traffic.sampling).texts
        goodput = with_trees(measure_goodput(contestants, walks, config), contestants, config, prompts, texts)
        sampled = promotion.traffic.sampling == "sampled"
        confidence = confidence_fit(contestants, config, prompts, run.config.seed, sampled=sampled)
        goodput = goodput.model_copy(update={"confidence": confidence})
    suites = [_suite(run, contestants, name, goodput) for name in promotion.suites]
    if shown:
        suites.append(_after_images(run, contestants, shown, goodput))
    under = conditions(
        config, Counter.reference(contestants.target), target=run.target, draft=run.folder.export,
        dataset_hash=run.samples.dataset_hash, template_hash=run.samples.template_hash, prompts=len(prompts),
        texts=zip(prompts, found.greedy.texts, strict=True),
    )  # fmt: skip
    served, served_gap = _served(run, contestants, prompts)
    evidence = gather(
        found, [suite for suite, _ in suites], config, promotion, dataset_hash=run.samples.dataset_hash,
        champion_label=champion_label, served_gap=served_gap, goodput=goodput,
    )  # fmt: skip
    result = build_result(
        found, config, under, evidence, traffic=run.config.promotion.traffic.sampling, served=served,
        suites=[result for _, result in suites], goodput=goodput,
    )  # fmt: skip
    return result, evidence, request_counts(found, under, prompts[: promotion.smoke_prompts])


def _served(
    run: PreparedRun, contestants: Contestants, prompts: Sequence[Sequence[int]]
) -> tuple[ServedResult | None, float | None]:
    """What was measured in the serving engine, and its acceptance length over that of a walk over its texts, - 1."""
    if not run.folder.served.is_file():
        return None, None
    served, lookahead = ServedResult.read(run.folder.served), run.config.benchmark.lookahead
    if not served.length:
        return served, None
    walked = at(walk_decoded(contestants, contestants.draft, prompts, served.texts, lookahead), lookahead)
    return served.model_copy(update={"texts": ()}), served.length / acceptance_length(walked) - 1


def _suite(
    run: PreparedRun, contestants: Contestants, name: str, goodput: MeasuredGoodput | None
) -> tuple[Ground, SuiteResult]:
    """All contestants on further prompts: what the gate compares, and what people see."""
    config, suite = run.config.benchmark, suite_prompts(run.config, run.target, name)
    traffic = run.config.promotion.traffic
    found = measure_suite(
        contestants, config, name, suite.prompts, sampled=traffic.sampling == "sampled", seed=run.config.seed
    )
    return _judged(
        run, found, goodput, name=name, dataset_hash=suite.dataset_hash, categories=suite.categories,
        contexts=tuple(map(len, suite.prompts)), too_long=suite.too_long,
    )  # fmt: skip


def _after_images(
    run: PreparedRun, contestants: Contestants, prompts: Sequence[Prompt], goodput: MeasuredGoodput | None
) -> tuple[Ground, SuiteResult]:
    """The same on held-out prompts with images."""
    return _judged(
        run, measure_after_images(run, contestants, prompts), goodput, name=GROUND,
        dataset_hash=run.samples.dataset_hash, contexts=tuple(len(prompt.tokens) for prompt in prompts),
    )  # fmt: skip


def _judged(
    run: PreparedRun, found: WalkedTexts, goodput: MeasuredGoodput | None, *, too_long: int = 0, **named: Any
) -> tuple[Ground, SuiteResult]:
    config, promotion = run.config.benchmark, run.config.promotion
    walks = found.by_rule(config.sampled_proposals)
    compared = ground(margin=promotion.suite_margin, walks=walks, lookahead=config.lookahead, **named)
    shown = suite_result(compared, distinct_token_share(found.texts), too_long)
    return with_loads(compared, walks, goodput, promotion.traffic.loads_of(config)), shown


def tables(result: BenchmarkResult) -> Iterator[Table]:
    """Acceptance length by lookahead, and predicted goodput by load if it was measured."""
    acceptance = {f"{result.conditions.target}: {title}": rows for title, rows in acceptance_tables(result).items()}
    titled = acceptance | {"Predicted goodput": goodput_rows(result)}
    yield from (terminal_table(title, rows) for title, rows in titled.items() if rows)


def terminal_table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Columns of figures behind one of names; no word of their headings is broken, though logs have 80 columns."""
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, name in enumerate(rows[0]):
        shown.add_column(name, justify="right" if place else "left", min_width=max(map(len, name.split())))
    for row in rows:
        shown.add_row(*row.values())
    return shown


def lines(result: BenchmarkResult) -> list[str]:
    """What the tables do not show, one fact per line."""
    at = result.conditions.lookahead
    ties = [divergence for divergence in result.lossless.divergences if divergence.tie]
    return [
        *(f"{topic}: {text}" for topic, text in (findings(result) | suite_findings(result)).items()),
        *(f"Tie at token {tie.position}: gap {tie.gap:.2e}, delta {tie.delta:.2e}" for tie in ties),
        result.summary,
        f"acceptance length {result.length:.2f} at lookahead {at} in {result.wall_s:.0f} s",
    ]


def show(result: BenchmarkResult) -> None:
    """Print the tables, then what they do not show; the last line is the main figure."""
    Console(markup=False).print(*tables(result))
    print("\n".join(lines(result)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--champion", type=Path, help="exported folder of the draft in service")
    parser.add_argument("--champion-label", default="champion", help='what the gate calls it, for instance "version 3"')
    options = parser.parse_args()
    run = PreparedRun.open(options.run)
    with measured_use(run.folder, "inference"):
        result = benchmark_run(run, options.champion, options.champion_label)
    show(result)


if __name__ == "__main__":
    run_main(main)
