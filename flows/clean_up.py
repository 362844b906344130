"""The clean-up flow: old run folders and what dead runs left behind go. Scheduled daily."""

from prefect import flow

from tasks.retention import remove_old_runs, sweep_shared_memory


@flow(name="clean-up")
def clean_up(keep_runs: int = 10, unfinished_days: float = 30.0) -> str:
    """Bound the disk that runs take; versions, figures and exports stay in MLflow.

    Args:
        keep_runs: newest finished runs that are kept of every recipe.
        unfinished_days: a run that did not finish can be gone on with for so long after its last change.

    Returns what was removed, in words.
    """
    runs, folders = remove_old_runs(keep_runs, unfinished_days), sweep_shared_memory()
    return f"{runs} old runs and {folders} folders in shared memory removed"
