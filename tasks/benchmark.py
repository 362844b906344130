"""Measures the exported draft beside the champion, and the champion again every night."""

import shutil

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from infra.files.atomic import write_atomically
from infra.pools.base import Pool
from infra.records.acceptance import BenchmarkResult, RegisteredDraft
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.tracking import registry
from infra.tracking.registry import champion, download, version_of_run
from infra.tracking.runs import log_model_figures
from tasks.pools import run_main, span_of
from tasks.run import OpenRun
from tasks.side_effects import artifact_key, side_effect

TIMEOUT_S = 6 * 3600.0


@side_effect("benchmark", retries=1)
def benchmark_draft(run: OpenRun, pool: Pool, target: TargetRecord) -> BenchmarkResult:
    """Measure challenger and champion on the same prompts in one job.

    A resumed run that has registered its draft keeps the figures it was registered with.
    """
    registered = version_of_run(run.tracking_uri, run.draft_name, run.folder.name)
    if registered and run.folder.benchmark.exists():
        return BenchmarkResult.read(run.folder.benchmark)
    present = champion(run.tracking_uri, run.draft_name)
    run.folder.champion.unlink(missing_ok=True)
    if present:
        write_atomically(run.folder.champion, present)
    arguments: list[str] = []
    if present and _comparable(run, present, target):
        folder = run.folder.path / "champion"
        shutil.rmtree(folder, ignore_errors=True)
        downloaded = download(run.tracking_uri, present, folder)
        arguments = ["--champion", str(downloaded), "--champion-label", f"version {present.version}"]
    run_main(run, pool, "benchmark", "models.benchmark.run", *arguments, timeout_s=TIMEOUT_S, span=span_of(run))
    return BenchmarkResult.read(run.folder.benchmark)


@side_effect("serving benchmark", retries=1)
def benchmark_served(run: OpenRun, pool: Pool) -> None:
    """Measure the exported draft in the serving engine, if the run uses one; the benchmark includes the figures."""
    if run.config.own_engine == "sglang" and run.config.benchmark.served_concurrency:
        run_main(run, pool, "serving-benchmark", "models.benchmark.served", timeout_s=TIMEOUT_S, span=span_of(run))


@side_effect("measure again", retries=1)
def measure_again(run: OpenRun, pool: Pool) -> BenchmarkResult:
    """Benchmark the version's export as its run did, without an opponent."""
    run_main(run, pool, "benchmark", "models.benchmark.run", timeout_s=TIMEOUT_S, span=span_of(run))
    result = BenchmarkResult.read(run.folder.benchmark)
    get_run_logger().info(result.summary)
    return result


def _comparable(run: OpenRun, present: RegisteredDraft, target: TargetRecord) -> bool:
    logger, floats = get_run_logger(), "floating-point numbers"
    precision, other = run.config.served_quantization(target.quantization), present.tags.get(registry.QUANTIZATION)
    if (other or None) != precision:
        logger.warning(
            "champion %s was trained for the target in %s, which is now served in %s: compared with no draft",
            present.version, other or floats, precision or floats,
        )  # fmt: skip
        return False
    if present.tags.get("target_revision") != target.revision:
        logger.warning("champion %s is of another target revision: compared with no draft", present.version)
        return False
    logger.info("compared with version %s of %s, the champion", present.version, present.name)
    return True


@side_effect("note figures")
def note_figures(run: OpenRun, draft: RegisteredDraft, result: BenchmarkResult) -> None:
    """Log the figures with the version's model, as a curve over the nights."""
    at = result.conditions.lookahead
    figures = {
        "nightly/acceptance_length": result.length,
        **({"nightly/acceptance_length_reference": result.reference.length[at]} if result.reference else {}),
        "nightly/lossless_mismatches": float(result.lossless.mismatches),
        "nightly/plain_tokens_per_s": result.speed.plain_tokens_per_s,
    }
    log_model_figures(run.tracking_uri, draft, figures)


@side_effect("tell of change")
def tell_of_change(draft: RegisteredDraft, result: BenchmarkResult, max_gap: float) -> str:
    """One sentence and an artifact. Raises Refusal where somebody has to look; a source that changes is no reason."""
    counter = result.conditions.engine
    counted_by = draft.tags.get(registry.COUNTED_BY, counter)
    if counted_by.split()[0] != counter.split()[0]:
        raise Refusal(
            f"version {draft.version} of {draft.name} was benchmarked by {counted_by}, and tonight {counter} counted: "
            "the two are not compared; run the flow on the same kind of GPUs, or retrain"
        )
    now, then = result.length, draft.acceptance_length
    assert then, "a version is registered with its acceptance length"
    moved = now / then - 1
    said = (
        f"version {draft.version} of {draft.name}: acceptance length {now:.3f}, {then:.3f} when it was registered "
        f"({moved:+.1%}), {result.lossless.mismatches} mismatches in {result.lossless.tokens} tokens"
    )
    same_prompts = draft.tags.get("dataset_hash", result.conditions.dataset_hash) == result.conditions.dataset_hash
    if not same_prompts:
        said += "; the lengths are not compared, because the text is another by now (data.source or Draftsmith changed)"
    create_markdown_artifact(
        f"# {draft.name}\n\n{said}.\n\n{result.summary}.", key=artifact_key("nightly-benchmark", draft.name)
    )
    if (same_prompts and abs(moved) > max_gap) or result.lossless.mismatches:
        raise Refusal(f"{said}: look at what has changed in engine, driver or hardware, then benchmark again")
    get_run_logger().info(said)
    return said
