"""Leases devices. Who acquired them gives them back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from infra.pools.base import Pool, PoolBusyError, PoolProvider, PoolSpec
from infra.pools.local import LocalPools
from infra.processes import Owner
from tasks.run import OpenRun


@contextmanager
def lease(run: OpenRun, role: Literal["inference", "training"]) -> Iterator[Pool]:
    """The run's pool for one role, given back at the end with everything on it stopped."""
    config = run.config.inference_pool if role == "inference" else run.config.training_pool
    provider = LocalPools()
    owner = replace(run.owner, name=f"{run.owner.name}/{role}")
    try:
        yield acquire_pool(provider, PoolSpec(role, config.gpus), owner)
    finally:
        provider.release(owner.name)


def _busy(_task: Task, _run: TaskRun, state: State) -> bool:
    return isinstance(state.result(raise_on_failure=False), PoolBusyError)


@task(name="acquire pool", retries=120, retry_delay_seconds=30, retry_condition_fn=_busy, cache_policy=NO_CACHE)
def acquire_pool(provider: PoolProvider, spec: PoolSpec, owner: Owner) -> Pool:
    """Lease devices; waits for an hour where other runs hold them."""
    return provider.acquire(spec, owner)
