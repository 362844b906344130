"""The clean-up flow, scheduled daily: bounds everything that grows while schedules run."""

from prefect import flow

from tasks.retention import (
    cut_logs,
    empty_mlflow_trash,
    remove_cache,
    remove_datasets,
    remove_old_runs,
    remove_prompts,
    remove_tracked_runs,
    sweep_shared_memory,
)


@flow(name="clean-up")
def clean_up(
    *,
    keep_runs: int = 10,
    unfinished_days: float = 30.0,
    keep_tracked_runs: int = 30,
    keep_checkpoints: int = 3,
    trash_days: float = 30.0,
    cache_days: float = 60.0,
    prompt_days: float = 60.0,
    log_mib: int = 8,
) -> str:
    """Remove old runs, versions, caches and logs. What serves, or is the way back from it, always stays.

    Args:
        keep_runs: newest finished run folders that are kept of every recipe.
        unfinished_days: an unfinished run can be resumed for this many days after its last change.
        keep_tracked_runs: newest MLflow runs, with their registered versions, that are kept of every registered model
            and recipe, in the experiments that runs of this folder were tracked in.
        keep_checkpoints: newest of these MLflow runs whose checkpoints are kept too.
        trash_days: what anybody deleted in this MLflow leaves its database after this many days.
        cache_days: prepared targets, samples and downloads are removed this many days after their last use.
        prompt_days: prompts sampled from request logs are removed after this many days, and everything that was made of
            them here: cached samples and answers, run folders, data sets in MLflow.
        log_mib: a larger log keeps its last part only, as NAME.1.

    Returns what was removed, in words. Raises ExceptionGroup, once all steps were tried, with the errors of those that
    failed.
    """
    removed = {
        "prompt samples": remove_prompts(prompt_days, return_state=True),
        "data sets in MLflow": remove_datasets(prompt_days, return_state=True),
        "runs in MLflow": remove_tracked_runs(keep_tracked_runs, keep_checkpoints, return_state=True),
        "run folders": remove_old_runs(keep_runs, unfinished_days, prompt_days, return_state=True),
        "cached folders": remove_cache(cache_days, return_state=True),
        "shared-memory folders": sweep_shared_memory(return_state=True),
    }
    others = [cut_logs(log_mib, return_state=True), empty_mlflow_trash(trash_days, return_state=True)]
    failed = [state for state in (*removed.values(), *others) if not state.is_completed()]
    if failed:
        errors = [error for state in failed if isinstance(error := state.result(raise_on_failure=False), Exception)]
        raise ExceptionGroup("; ".join(map(str, errors)), errors)
    return "removed: " + ", ".join(f"{state.result()} {kind}" for kind, state in removed.items())
