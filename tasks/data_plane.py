"""What tasks with side effects share: their decorator, and processes of the data plane as child processes."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from infra.pools.base import Pool
from infra.pools.local import LocalPool
from infra.processes.process import module
from infra.refusal import Refusal
from tasks.run import OpenRun

P = ParamSpec("P")
R = TypeVar("R")
RETRY_DELAY_S = 5


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


def side_effect(name: str, retries: int = 2) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task that changes something outside: never cached, retried unless a person has to act."""
    return task(
        name=name,
        retries=retries,
        retry_delay_seconds=RETRY_DELAY_S,
        retry_condition_fn=_worth_retrying,
        cache_policy=NO_CACHE,
    )


def _worth_retrying(_task: Task[Any, Any], _run: TaskRun, state: State) -> bool:
    """Whether a retry may help; not where a person has to change something."""
    return not isinstance(state.result(raise_on_failure=False), Refusal)
