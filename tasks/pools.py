"""Leases devices. Who acquired them gives them back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from infra.pools.base import Pool, PoolBusyError, PoolProvider, PoolSpec, Role
from infra.pools.choice import pool_provider, pool_specs
from infra.processes import Owner
from tasks.run import OpenRun


@contextmanager
def lease(run: OpenRun, *roles: Role) -> Iterator[Sequence[Pool]]:
    """A pool per role, all at once; given back at the end with everything on them stopped."""
    settings = run.config.pools
    provider = pool_provider(settings)
    wanted = pool_specs(settings, run.config.generator.count)
    try:
        yield acquire_pools(provider, [spec for spec in wanted if spec.role in roles], run.owner)
    finally:
        provider.release(run.owner.name)


def _busy(_task: Task, _run: TaskRun, state: State) -> bool:
    return isinstance(state.result(raise_on_failure=False), PoolBusyError)


@task(name="acquire pools", retries=120, retry_delay_seconds=30, retry_condition_fn=_busy, cache_policy=NO_CACHE)
def acquire_pools(provider: PoolProvider, specs: Sequence[PoolSpec], owner: Owner) -> Sequence[Pool]:
    """Lease devices; waits for an hour where other runs hold them."""
    return provider.acquire(specs, owner)
