"""`python -m models.benchmark.served RUN`: the exported draft in the serving engine, on the run's held-out prompts.

Two SGLang servers one after the other, target alone and target with draft: the same prompts, greedy, at several
concurrencies. Acceptance is what the engine emits step by step. Writes RUN/served.json.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.records.acceptance import Acceptance, ServedResult, ServedSpeed
from infra.sglang.client import Answer
from models.benchmark.serving import Ask, Setup, ask_all, counts_of, whats_missing
from models.data.prompts import heldout_prompts
from models.decoding.acceptance import summarise
from models.progress_bars import Advance, bars
from models.run import PreparedRun


@dataclass(frozen=True)
class ServedMeasurement:
    """One server's answers to all prompts, and its speed at every concurrency."""

    answers: Sequence[Answer]
    speeds: tuple[ServedSpeed, ...]


def serve(run: PreparedRun) -> ServedResult:
    """Measure both servers. Raises Refusal for what a person has to correct."""
    config = run.config.benchmark
    missing = whats_missing(run.folder.export, config.served_concurrency)
    if missing:
        return ServedResult(lookahead=config.lookahead, note=missing)
    plain, speculative = _measure(run, None), _measure(run, run.folder.export)
    pairs = list(zip(plain.answers, speculative.answers, strict=True))
    return ServedResult(
        lookahead=config.lookahead,
        acceptance=summarise([(counts_of(answer, config.lookahead),) for answer in speculative.answers]),
        same_text=sum(alone.tokens == together.tokens for alone, together in pairs),
        plain=plain.speeds,
        speculative=speculative.speeds,
        note=f"temperature 0, {config.max_new_tokens} new tokens at most",
    )


def served_acceptance(run: PreparedRun, draft: Path, prompts: Sequence[Sequence[int]]) -> Acceptance | None:
    """Acceptance of a draft in the serving engine; None if the run uses no serving engine or it cannot run here."""
    config = run.config.benchmark
    if run.config.generator.engine != "sglang" or not config.served_concurrency:
        return None
    if whats_missing(draft, config.served_concurrency):
        return None
    setup = setup_of(run)
    with setup.serving(draft, config.lookahead) as client:
        answers = setup.watch_all(client, prompts)
    return summarise([(counts_of(answer, config.lookahead),) for answer in answers])


def setup_of(run: PreparedRun) -> Setup:
    """How a run's target is served."""
    config = run.config.benchmark
    return Setup(
        Path(run.target.path),
        run.config.generator,
        config.compute_dtype,
        config.prompt_tokens,
        config.max_new_tokens,
        config.served_concurrency,
        Owner(run.folder.name, run.folder.logs),
    )


def _measure(run: PreparedRun, draft: Path | None) -> ServedMeasurement:
    """One server: a first pass that is watched step by step and warms it up, then one at every concurrency, timed."""
    config, setup = run.config.benchmark, setup_of(run)
    prompts = heldout_prompts(run.open_samples("heldout"), config)
    what = "target alone" if draft is None else "target and draft"
    with setup.serving(draft, config.lookahead) as client, bars() as bar:
        watched = bar(f"{what}, step by step", len(prompts))
        answers = setup.watch_all(client, prompts, lambda _: watched(1))
        speeds = [
            _time(partial(client.generate, sampling=setup.greedy), prompts, concurrency, bar(what, len(prompts)))
            for concurrency in config.served_concurrency
        ]
    return ServedMeasurement(answers, tuple(speeds))


def _time(ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, advance: Advance) -> ServedSpeed:
    latencies: list[float] = []

    def done(seconds: float) -> None:
        latencies.append(seconds)
        advance(1)

    begun = time.perf_counter()
    answers = ask_all(ask, prompts, concurrency, done)
    wall_s = time.perf_counter() - begun
    ordered = sorted(latencies)
    return ServedSpeed(
        concurrency=concurrency,
        tokens_per_s=sum(len(answer.tokens) for answer in answers) / wall_s,
        latency_p50_s=ordered[len(ordered) // 2],
        latency_p95_s=ordered[int(0.95 * (len(ordered) - 1))],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = PreparedRun.open(parser.parse_args().run)
    result = serve(run)
    write_atomically(run.folder.served, result)
    print(result.summary, flush=True)


if __name__ == "__main__":
    run_main(main)
