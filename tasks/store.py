"""Starts the Mooncake store of runs that have one."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_run_logger

from infra.pools.base import Pool
from infra.processes.keep_running import KeptProcess
from infra.transport.choice import objects_folder
from infra.transport.mooncake.services import start_store
from tasks.data_plane import on_cpu
from tasks.run import OpenRun


@contextmanager
def storing(run: OpenRun, pool: Pool) -> Iterator[list[KeptProcess]]:
    """The store's processes, on the trainer's machine; none for transports of one machine.

    On a cluster they run on the flow's machine: transport.address names it, and nobody knows the trainer's before.
    """
    settings = run.config.transport
    if settings.kind != "mooncake":
        yield []
        return
    home = pool if run.config.pools.kind == "local" else on_cpu(run)
    with start_store(home, run.folder, settings, objects_folder(settings, run.folder), get_run_logger().info) as store:
        yield store
