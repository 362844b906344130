"""Starts the generators. They capture until the ledger says that the run is finished, or until they are stopped."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from infra.pools.base import Pool
from infra.processes import Process, module
from tasks.run import OpenRun


@contextmanager
def generating(run: OpenRun, pool: Pool) -> Iterator[list[Process]]:
    """Generators that run while the trainer trains."""
    with ExitStack() as stack:
        generators = start_generators(run, pool)
        for generator in generators:
            stack.callback(generator.stop)
        yield generators


@task(name="start generators", cache_policy=NO_CACHE)
def start_generators(run: OpenRun, pool: Pool) -> list[Process]:
    """Start the configured number of generators on the inference pool; the pool's release stops them too."""
    capture = run.config.capture
    generators = []
    for index in range(capture.generators):
        command = module("models.capture.generator", run.folder.path, "--index", str(index))
        role = f"generator-{index}"
        generators.append(
            pool.launch(role, command, threads=capture.threads, processes=capture.generators, index=index)
        )
        get_run_logger().info("%s: log in %s", role, generators[-1].log)
    return generators
