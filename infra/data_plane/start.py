"""The command lines of a run's data plane, started on pools and restarted after crashes."""

from functools import partial

from infra.data_plane.elastic_generators import generator_role
from infra.files.run_folder import RunFolder
from infra.pools.base import Pool
from infra.processes.keep_running import KeptProcess
from infra.processes.process import module


def start_generator(
    pool: Pool, folder: RunFolder, index: int, sharing: int, threads: int | None, alone: bool = False
) -> KeptProcess:
    """Start generator `index` on its share of a pool among `sharing` processes, or, if `alone`, on all of it."""
    command = module("models.capture.generator", folder.path, "--index", str(index))
    share = None if alone else index
    return KeptProcess(
        partial(pool.launch, generator_role(index), command, threads=threads, processes=sharing, index=share)
    )


def start_trainer(pool: Pool, folder: RunFolder, ranks: int, threads: int | None) -> KeptProcess:
    """Start the trainer with `ranks` ranks on the training pool."""
    command = module("models.training.launch", folder.path, "--ranks", str(ranks))
    return KeptProcess(partial(pool.launch, "trainer", command, threads=threads, processes=ranks))
