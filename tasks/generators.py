"""Starts the generators. They capture until the ledger says that the run is finished, or until they are stopped."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from infra.data_plane import start_generator
from infra.keep_running import KeptProcess
from infra.pools.base import Pool
from tasks.run import OpenRun


@contextmanager
def generating(run: OpenRun, pool: Pool) -> Iterator[list[KeptProcess]]:
    """Generators that run while the trainer trains."""
    with ExitStack() as stack:
        generators = start_generators(run, pool)
        for generator in generators:
            stack.callback(generator.close)
        yield generators


@task(name="start generators", cache_policy=NO_CACHE)
def start_generators(run: OpenRun, pool: Pool) -> list[KeptProcess]:
    """Start the configured number of generators on the inference pool; the pool's release stops them too."""
    settings, generators = run.config.generator, []
    for index in range(settings.count):
        generators.append(start_generator(pool, run.folder, index, settings.count, settings.threads))
        get_run_logger().info("generator-%d: log in %s", index, generators[-1].process.log)
    return generators
