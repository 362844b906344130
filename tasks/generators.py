"""Starts the generators. They capture until the ledger says that the run is finished, or until they are stopped."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from prefect import get_run_logger

from infra.data_plane.elastic_generators import ElasticGenerators
from infra.data_plane.elasticity import Elasticity
from infra.data_plane.start import start_generator
from infra.pools.base import Pool
from infra.processes.keep_running import KeptProcess
from tasks.data_plane import side_effect
from tasks.pools import single_pools
from tasks.run import OpenRun


@contextmanager
def generating(run: OpenRun, pool: Pool) -> Iterator[ElasticGenerators]:
    """Generators that run while the trainer trains."""
    with closing(start_generators(run, pool)) as generators:
        yield generators


@side_effect("start generators", retries=0)
def start_generators(run: OpenRun, pool: Pool) -> ElasticGenerators:
    """Start the configured number of generators on the inference pool; the pool's release stops them too."""
    settings, generators = run.config.generator, []
    with run.open_ledger() as ledger:
        ledger.reopen()
    for index in range(settings.count):
        generators.append(start_generator(pool, run.folder, index, settings.count, settings.threads))
        get_run_logger().info("generator-%d: log in %s", index, generators[-1].process.log)
    here = run.config.pools.kind == "local"

    def start(own: Pool, index: int) -> KeptProcess:
        return start_generator(own, run.folder, index, settings.most if here else 1, settings.threads, alone=True)

    elasticity = Elasticity(settings.count, settings.most, settings.patience_s)
    # On this machine another place is the same place: what cannot run there is left out.
    return ElasticGenerators(run.folder, generators, start, single_pools(run), elasticity, replaces=not here)
