"""Removes what grows while schedules run: old runs, unused cache, prompts, logs, shared memory."""

from contextlib import suppress

from prefect import get_run_logger

from infra.files.locks import sweep
from infra.files.run_folder import newest_runs
from infra.refusal import Refusal
from infra.run.retention import (
    bound_logs,
    is_finished,
    old_runs,
    remove_all,
    remove_old_prompts,
    remove_rest,
    remove_unused_cache,
)
from infra.settings import cache_folder, runs_folder, shared_memory_folder, tracking_database, tracking_uri
from infra.tracking.datasets import remove_old_datasets
from infra.tracking.retention import empty_trash, end_gone_runs, noted_experiments, remove_old_tracking
from infra.tracking.runs import TrackedRun
from tasks.side_effects import side_effect

MIB = 2**20
LOGS = ("*/logs/*.log", ".stack/up.log", ".stack/logs/*.log", "drift/*/logs/*.log")


@side_effect("remove old prompts", retries=1)
def remove_prompts(days: float) -> int:
    """How many samples of users' prompts were removed, and folders and files of the cache that were made of them."""
    gone = remove_old_prompts(runs_folder() / "drift", cache_folder(), days)
    for path in gone:
        get_run_logger().info("removed %s", path)
    return len(gone)


@side_effect("remove old data sets from MLflow", retries=1)
def remove_datasets(prompt_days: float) -> int:
    """How many data sets were removed from MLflow: old ones of users' requests, and others that no run names."""
    return remove_old_datasets(tracking_uri(), noted_experiments(runs_folder()), prompt_days)


@side_effect("remove old runs from MLflow", retries=1)
def remove_tracked_runs(keep_runs: int, keep_checkpoints: int) -> int:
    """How many runs were removed from MLflow, with their versions and artifacts. None that can be resumed here is."""
    uri, experiments = tracking_uri(), noted_experiments(runs_folder())
    if ended := end_gone_runs(uri, experiments, runs_folder()):
        get_run_logger().info("ended in MLflow: %d runs whose folders are gone", ended)
    runs, checkpoints = remove_old_tracking(uri, experiments, keep_runs, keep_checkpoints, resumable_runs())
    get_run_logger().info("removed from MLflow: %d runs, %d checkpoints", runs, checkpoints)
    return runs


def resumable_runs() -> set[str]:
    """Ids in MLflow of the unfinished runs whose folders are here."""
    found = set[str]()
    for folder in newest_runs(runs_folder()):
        with suppress(FileNotFoundError, Refusal):  # nothing is tracked yet, or the record is damaged: none to resume
            if not is_finished(folder):
                found.add(TrackedRun.read(folder.tracking).run_id)
    return found


@side_effect("remove old runs", retries=1)
def remove_old_runs(keep: int, unfinished_days: float, prompt_days: float) -> int:
    """How many run folders were removed, with their rows in a shared ledger.

    Raises Refusal, once all others are gone, for those whose rows cannot be removed, once for each and each reason.
    """
    remove_rest(runs_folder())
    gone, errors = remove_all(old_runs(runs_folder(), keep, unfinished_days, prompt_days))
    for name in gone:
        get_run_logger().info("removed run %s", name)
    if errors:
        raise Refusal("; ".join(errors))
    return len(gone)


@side_effect("empty MLflow's trash", retries=1)
def empty_mlflow_trash(days: float) -> None:
    """Remove the rows of what was deleted in MLflow, if its database is reachable from here."""
    if database := tracking_database():
        empty_trash(tracking_uri(), database, days)
    else:
        get_run_logger().info("MLflow's database is not known here: on its server, schedule `mlflow gc`")


@side_effect("remove unused cache", retries=1)
def remove_cache(days: float) -> int:
    """How many cached folders and files were removed."""
    gone = remove_unused_cache(cache_folder(), days)
    for path in gone:
        get_run_logger().info("removed %s, unused", path)
    return len(gone)


@side_effect("cut logs", retries=1)
def cut_logs(log_mib: int) -> None:
    """Cut logs above the limit."""
    runs = runs_folder()
    for log in bound_logs((log for pattern in LOGS for log in runs.glob(pattern)), log_mib * MIB):
        get_run_logger().info("cut %s: its end is in %s.1", log, log.name)


@side_effect("sweep shared memory", retries=1)
def sweep_shared_memory() -> int:
    """Remove folders of dead runs from this machine's shared memory; their number."""
    gone = sweep(shared_memory_folder())
    for folder in gone:
        get_run_logger().info("removed %s, whose owner is gone", folder)
    return len(gone)
