"""Registers the draft with its figures, and promotes it."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from infra.provenance import git_sha
from infra.records import BenchmarkResult, ExportRecord, RegisteredDraft, TargetRecord, TrainingResult
from infra.tracking import registry
from infra.tracking.runs import TrackedRun, log_benchmark, log_folder
from tasks.data_plane import worth_retrying
from tasks.run import OpenRun

RETRIES = {"retries": 2, "retry_delay_seconds": 5, "retry_condition_fn": worth_retrying, "cache_policy": NO_CACHE}


@task(name="register draft", **RETRIES)
def register_draft(
    run: OpenRun,
    tracking: TrackedRun,
    target: TargetRecord,
    trained: TrainingResult,
    export: ExportRecord,
    result: BenchmarkResult,
) -> RegisteredDraft:
    """Log export and benchmark, and register them as the challenger; a resumed run does not register twice."""
    registered = registry.version_of_run(tracking.uri, run.draft_name, run.folder.name)
    if registered:
        return registered
    model_id = log_folder(tracking, run.folder.export, "draft", trained.steps, "draft", layout=export.layout)
    plots = sorted(run.folder.plots.glob("*.png"))
    figures, table = _figures(result), acceptance_table(result)
    conditions = result.conditions.model_dump()
    log_benchmark(tracking, model_id, trained.steps, metrics=figures, conditions=conditions, table=table, files=plots)
    tags = {
        registry.RUN: run.folder.name,
        registry.ACCEPTANCE: f"{figures['acceptance_length']:.4f}",
        "lookahead": str(result.conditions.lookahead),
        "beats_prompt_lookup": str(result.beats_prompt_lookup).lower(),
        "gate": f"{'passed' if result.gate.passed else 'not passed'}: {result.gate.reason}",
        "target": target.name,
        "target_revision": target.revision,
        "dataset_hash": result.conditions.dataset_hash,
        "git_sha": git_sha(),
    }
    draft = registry.register(tracking.uri, run.draft_name, model_id, tracking.run_id, tags)
    get_run_logger().info("registered version %s of %s", draft.version, draft.name)
    return draft


@task(name="promote draft", **RETRIES)
def promote_draft(run: OpenRun, draft: RegisteredDraft) -> RegisteredDraft:
    """Make the draft the champion, once: a resumed run does not undo what was decided since."""
    if registry.CHALLENGER not in draft.aliases:
        get_run_logger().info("version %s is not the challenger (any more): aliases stay as they are", draft.version)
        return draft
    promoted = registry.promote(run.tracking_uri, draft.name, draft.version)
    get_run_logger().info("version %s of %s is champion", promoted.version, promoted.name)
    return promoted


def acceptance_table(result: BenchmarkResult) -> dict[str, list[float | int | None]]:
    """Acceptance length by lookahead, one column per source of proposals."""
    lookaheads = sorted(result.simulated.length)
    table: dict[str, list[float | int | None]] = {"lookahead": [*lookaheads]}
    columns = {
        "simulated": result.simulated,
        "reference": result.reference,
        "sampled": result.sampled,
        "prompt lookup": result.prompt_lookup,
        "prompt lookup, sampled": result.prompt_lookup_sampled,
        "champion": result.champion,
    }
    for name, column in columns.items():
        if column:
            table[name] = [column.length.get(lookahead) for lookahead in lookaheads]
    return table


def _figures(result: BenchmarkResult) -> dict[str, float]:
    lookahead = result.conditions.lookahead
    figures = {
        "acceptance_length": result.simulated.length[lookahead],
        "reference_acceptance_length": result.reference.length[lookahead],
        "sampled_acceptance_length": result.sampled.length[lookahead],
        "prompt_lookup_acceptance_length": result.prompt_lookup.length[lookahead],
        "target_distinct_token_share": result.target_distinct_token_share,
        "lossless_mismatches": result.lossless.mismatches,
        "plain_tokens_per_s": result.speed.plain_tokens_per_s,
        "gate_lower_bound": result.gate.lower_bound,
    }
    figures |= {f"acceptance_length/lookahead-{k}": length for k, length in result.simulated.length.items()}
    if result.speed.speculative_tokens_per_s is not None:
        figures["speculative_tokens_per_s"] = result.speed.speculative_tokens_per_s
    return figures
