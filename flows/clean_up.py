"""The clean-up flow, scheduled daily: bounds everything that grows while schedules run."""

from prefect import flow

from tasks.retention import remove_old_runs, remove_stale_files, remove_tracked_runs, sweep_shared_memory


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
        keep_tracked_runs: newest MLflow runs, with their registered versions, that are kept of every recipe.
        keep_checkpoints: newest MLflow runs of every recipe whose checkpoints are kept too.
        trash_days: what was deleted in MLflow leaves its database after this many days.
        cache_days: prepared targets, samples and downloads are removed this many days after their last use.
        prompt_days: prompts sampled from request logs, and samples made of them, are removed after this many days.
        log_mib: a larger log keeps its last part only, as NAME.1.

    Returns what was removed, in words.
    """
    runs = remove_old_runs(keep_runs, unfinished_days)
    tracked = remove_tracked_runs(keep_tracked_runs, keep_checkpoints, trash_days, prompt_days)
    files = remove_stale_files(cache_days, prompt_days, log_mib)
    folders = sweep_shared_memory()
    return (
        f"removed: {runs} run folders, {tracked} runs in MLflow, {files} unused files, {folders} shared-memory folders"
    )
