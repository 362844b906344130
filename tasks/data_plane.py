"""How tasks start the data plane: by command line, followed line by line, always stopped again."""

from prefect import Task, get_run_logger
from prefect.client.schemas.objects import State, TaskRun

from infra.pools.base import Pool
from infra.pools.local import LocalPool
from infra.processes.process import module
from infra.refusal import Refusal
from tasks.run import OpenRun


def run_main(run: OpenRun, pool: Pool, role: str, name: str, *arguments: str, timeout_s: float) -> None:
    """Run `python -m NAME RUN ARGUMENTS` on a pool to its end, its output forwarded to the task's log.

    Raises ProcessFailedError with the end of the log, or TimeoutError.
    """
    process = pool.launch(role, module(name, run.folder.path, *arguments))
    try:
        process.wait(timeout_s, on_line=get_run_logger().info)
    finally:
        process.stop()


def on_cpu(run: OpenRun) -> Pool:
    """This machine's cores, for what needs no lease."""
    return LocalPool(run.owner)


def worth_retrying(_task: Task, _run: TaskRun, state: State) -> bool:
    """Crashes are; what a person has to mend is not."""
    return not isinstance(state.result(raise_on_failure=False), Refusal)
