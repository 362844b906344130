"""Removes old run folders, and what dead runs left in shared memory."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from infra.locks import sweep
from infra.retention import old_runs, remove, remove_rest
from infra.settings import runs_folder, shared_memory_folder


@task(name="remove old runs", retries=1, cache_policy=NO_CACHE)
def remove_old_runs(keep: int, unfinished_days: float) -> int:
    """How many folders were removed."""
    remove_rest(runs_folder())
    gone = [folder.name for folder in old_runs(runs_folder(), keep, unfinished_days) if remove(folder)]
    for name in gone:
        get_run_logger().info("removed run %s", name)
    return len(gone)


@task(name="sweep shared memory", retries=1, cache_policy=NO_CACHE)
def sweep_shared_memory() -> int:
    """How many folders of dead runs were removed from this machine's shared memory."""
    gone = sweep(shared_memory_folder())
    for folder in gone:
        get_run_logger().info("removed %s, whose owner is gone", folder)
    return len(gone)
