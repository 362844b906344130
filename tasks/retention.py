"""Removes what grows while schedules run: old runs, unused cache, prompts, logs, shared memory."""

from prefect import get_run_logger

from infra.files.locks import sweep
from infra.run.retention import bound_logs, old_runs, remove, remove_old_prompts, remove_rest, remove_unused_cache
from infra.settings import cache_folder, runs_folder, shared_memory_folder, tracking_database, tracking_uri
from infra.tracking.datasets import remove_old_datasets
from infra.tracking.retention import empty_trash, remove_old_tracking
from tasks.side_effects import side_effect

MIB = 2**20
LOGS = ("*/logs/*.log", ".stack/logs/*.log", "drift/*/logs/*.log")


@side_effect("remove old runs", retries=1)
def remove_old_runs(keep: int, unfinished_days: float) -> int:
    """How many run folders were removed, with their rows in a shared ledger."""
    remove_rest(runs_folder())
    gone = [folder.name for folder in old_runs(runs_folder(), keep, unfinished_days) if remove(folder)]
    for name in gone:
        get_run_logger().info("removed run %s", name)
    return len(gone)


@side_effect("remove old runs from MLflow", retries=1)
def remove_tracked_runs(keep_runs: int, keep_checkpoints: int, trash_days: float, prompt_days: float) -> int:
    """Remove old runs and their data from MLflow, and empty its trash if its database is reachable; how many runs."""
    uri, database, logger = tracking_uri(), tracking_database(), get_run_logger()
    runs, checkpoints = remove_old_tracking(uri, keep_runs, keep_checkpoints)
    datasets = remove_old_datasets(uri, prompt_days)
    logger.info("removed from MLflow: %d runs, %d checkpoints, %d data sets", runs, checkpoints, datasets)
    if database:
        empty_trash(database, trash_days)
    else:
        logger.info("MLflow's database is not known here: on its server, schedule `mlflow gc --older-than 30d`")
    return runs


@side_effect("remove stale files", retries=1)
def remove_stale_files(cache_days: float, prompt_days: float, log_mib: int) -> int:
    """How many cached folders and prompt samples were removed; logs above the limit are cut."""
    runs = runs_folder()
    gone = [*remove_unused_cache(cache_folder(), cache_days), *remove_old_prompts(runs / "drift", prompt_days)]
    for path in gone:
        get_run_logger().info("removed %s, unused", path)
    for log in bound_logs((log for pattern in LOGS for log in runs.glob(pattern)), log_mib * MIB):
        get_run_logger().info("cut %s: its end is in %s.1", log, log.name)
    return len(gone)


@side_effect("sweep shared memory", retries=1)
def sweep_shared_memory() -> int:
    """Remove folders of dead runs from this machine's shared memory; their number."""
    gone = sweep(shared_memory_folder())
    for folder in gone:
        get_run_logger().info("removed %s, whose owner is gone", folder)
    return len(gone)
