"""Runs processes of the data plane from tasks, with their output in the task's log."""

from prefect import get_run_logger

from infra.pools.base import Pool
from infra.pools.local import LocalPool
from infra.processes.process import module
from tasks.run import OpenRun


def run_main(run: OpenRun, pool: Pool, role: str, name: str, *arguments: str, timeout_s: float) -> None:
    """Run `python -m NAME RUN ARGUMENTS` on a pool to its end, forwarding its output to the task's log.

    Raises ProcessFailedError with the end of the log, or TimeoutError.
    """
    process = pool.launch(role, module(name, run.folder.path, *arguments))
    try:
        process.wait(timeout_s, on_line=get_run_logger().info)
    finally:
        process.stop()


def on_cpu(run: OpenRun) -> Pool:
    """This machine's cores, which need no lease."""
    return LocalPool(run.owner)
