"""`python -m models.benchmark.smoke RUN EXPORT COUNTS`: does a draft decode as it was benchmarked?

EXPORT is the draft as serving gets it, downloaded from the registry; COUNTS are its benchmark's, of every conversation.
The benchmark's first prompts are walked and decoded again, in the serving engine too where that runs. Writes
RUN/smoke.json. Runs as a process of its own after a promotion.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from infra.files.atomic import sha256_file, write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.acceptance import RequestCounts, SmokeResult
from infra.records.data_path import TargetRecord
from infra.records.drafts import WEIGHTS
from infra.refusal import Refusal
from models.benchmark.contestants import load_contestants
from models.benchmark.counter import why_engine_counts
from models.benchmark.measure import DRAFT, at, walk_decoded, walk_texts
from models.benchmark.reference import decode_reference
from models.benchmark.served import acceptance_of, counts_of, served_answers, setup_of
from models.config.recipe import read_config
from models.decoding.acceptance import acceptance_length
from models.devices import leased_bytes
from models.dtypes import DTYPES
from models.progress_bars import bars
from models.run import RunWithTarget
from models.targets.model import eos_ids

DECODED = 2
"""Conversations decoded for real."""


def smoke_test(run: RunWithTarget, export: Path, benchmarked: RequestCounts) -> SmokeResult:
    """Decode again, and compare. Raises Refusal for an export that cannot be loaded."""
    found = sha256_file(export / WEIGHTS)
    if found != benchmarked.conditions.draft_revision:
        raise Refusal(
            f"the registry's weights (SHA-256 {found[:12]}) are not those that were benchmarked "
            f"({benchmarked.conditions.draft_revision[:12]})"
        )
    config, lookahead = run.config.benchmark, run.config.benchmark.lookahead
    prompts = benchmarked.prompts
    if not prompts:
        raise Refusal("the version's benchmark kept no prompts, so nothing can be decoded again: retrain")
    if why_engine_counts(run, leased_bytes()):
        return _in_engine(run, export, prompts, benchmarked)
    prompts = prompts[: len(benchmarked.texts) or len(prompts)]
    # SGLang refuses GPUs that something else occupies: the server has stopped before anything is loaded here.
    answers, served_gap = served_answers(run, export, prompts), None
    contestants = load_contestants(Path(run.target.path), [export], DTYPES[run.config.benchmark_dtype])
    # Where an engine counted, its benchmark kept no texts of the target alone.
    texts = (
        benchmarked.texts[: len(prompts)]
        or walk_texts(contestants, config, "smoke test", prompts, {DRAFT: contestants.draft}).texts
    )
    counts = at(walk_decoded(contestants, contestants.draft, prompts, texts, lookahead), lookahead)
    some = config.model_copy(update={"reference_tokens": DECODED * config.max_new_tokens})
    with bars() as bar:
        advance = bar("smoke test, decoding", some.reference_tokens)
        decoded = decode_reference(contestants, some, prompts, texts, advance)
    here = [of.as_served(len(text) - 1) for of, text in zip(counts, texts, strict=True)]
    if answers:
        written = [answer.tokens for answer in answers]
        walked = walk_decoded(contestants, contestants.draft, prompts, written, lookahead)
        served = acceptance_of(answers, lookahead, contestants.eos_ids)
        served_gap = served.length[lookahead] / acceptance_length(at(walked, lookahead)) - 1
    return judge(
        ratio(here),
        ratio(benchmarked.greedy[lookahead][: len(prompts)]),
        decoded.lossless.mismatches,
        served_gap,
        conversations=len(prompts),
        max_gap=run.config.promotion.max_gap,
    )


def _in_engine(
    run: RunWithTarget, export: Path, prompts: Sequence[Sequence[int]], benchmarked: RequestCounts
) -> SmokeResult:
    """For a target that the reference decoder does not decode: the serving engine alone, which benchmarked it too."""
    lookahead, setup = run.config.benchmark.lookahead, setup_of(run)
    with setup.serving(export, lookahead) as client:
        answers = setup.watch_all(client, prompts)
    ends = eos_ids(setup.target)
    here = [counts_of(answer, lookahead, ends).as_served(len(answer.tokens) - 1) for answer in answers]
    before = ratio(benchmarked.greedy[lookahead][: len(prompts)])
    max_gap = run.config.promotion.max_gap
    return judge(ratio(here), before, 0, None, conversations=len(prompts), max_gap=max_gap)


def judge(
    here: float, benchmarked: float, mismatches: int, served_gap: float | None, *, conversations: int, max_gap: float
) -> SmokeResult:
    """Whether the figures agree, in words."""
    reasons = []
    if mismatches:
        reasons.append(f"it is not lossless: {mismatches} mismatches with the target's own text")
    if abs(here / benchmarked - 1) > max_gap:
        reasons.append(f"acceptance length {here:.2f}, {benchmarked:.2f} when it was benchmarked")
    if served_gap is not None and abs(served_gap) > max_gap:
        reasons.append(f"the serving engine's acceptance length differs from it by {served_gap:+.1%}")
    engine = "" if served_gap is None else f", {served_gap:+.1%} in the serving engine"
    fine = f"acceptance length {here:.2f} in {conversations} conversations, {benchmarked:.2f} when benchmarked{engine}"
    return SmokeResult(passed=not reasons, reason="; ".join(reasons) or fine)


def ratio(rows: Sequence[tuple[float, float]]) -> float:
    """Acceptance length of `(tokens, steps)` rows: the ratio of their sums."""
    tokens, steps = (sum(column) for column in zip(*rows, strict=True))
    return tokens / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "export", "counts"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    folder = RunFolder(options.run.absolute())
    run = RunWithTarget(folder, read_config(folder.config), TargetRecord.read(folder.target))
    result = smoke_test(run, options.export, RequestCounts.read(options.counts))
    write_atomically(run.folder.smoke, result)
    print(f"smoke test {'passed' if result.passed else 'FAILED'}: {result.reason}", flush=True)


if __name__ == "__main__":
    run_main(main)
