"""What comes of a champion measured again: figures over time in MLflow, and a sentence."""

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from infra.records.acceptance import BenchmarkResult, RegisteredDraft
from infra.refusal import Refusal
from infra.tracking.runs import log_model_figures
from tasks.artifact_keys import artifact_key
from tasks.data_plane import side_effect
from tasks.run import OpenRun


@side_effect("note figures")
def note_figures(run: OpenRun, draft: RegisteredDraft, result: BenchmarkResult) -> None:
    """Log the figures with the version's model, where they make a line over the nights."""
    at = result.conditions.lookahead
    figures = {
        "nightly/acceptance_length": result.simulated.length[at],
        "nightly/acceptance_length_reference": result.reference.length[at],
        "nightly/lossless_mismatches": float(result.lossless.mismatches),
        "nightly/plain_tokens_per_s": result.speed.plain_tokens_per_s,
    }
    log_model_figures(run.tracking_uri, draft, figures)


@side_effect("tell of change")
def tell_of_change(draft: RegisteredDraft, result: BenchmarkResult, max_gap: float) -> str:
    """One sentence and an artifact. Raises Refusal where somebody has to look."""
    now, then = result.simulated.length[result.conditions.lookahead], draft.acceptance_length
    assert then, "a version is registered with its acceptance length"
    moved = now / then - 1
    said = (
        f"version {draft.version} of {draft.name}: acceptance length {now:.3f}, {then:.3f} when it was registered "
        f"({moved:+.1%}), {result.lossless.mismatches} mismatches in {result.lossless.tokens} tokens"
    )
    create_markdown_artifact(
        f"# {draft.name}\n\n{said}.\n\n{result.summary}.", key=artifact_key("nightly-benchmark", draft.name)
    )
    if abs(moved) > max_gap or result.lossless.mismatches:
        raise Refusal(f"{said}: look at what has changed in engine, driver or hardware, then benchmark again")
    get_run_logger().info(said)
    return said
