"""The command lines of a run's data plane, started on pools and kept running. Used by whoever owns the run."""

from functools import partial

from infra.keep_running import KeptProcess
from infra.pools.base import Pool
from infra.processes import module
from infra.run_folder import RunFolder


def start_generator(pool: Pool, folder: RunFolder, index: int, generators: int, threads: int | None) -> KeptProcess:
    """Start generator `index` of `generators` on its share of the inference pool."""
    command = module("models.capture.generator", folder.path, "--index", str(index))
    role = f"generator-{index}"
    return KeptProcess(partial(pool.launch, role, command, threads=threads, processes=generators, index=index))


def start_trainer(pool: Pool, folder: RunFolder, ranks: int, threads: int | None) -> KeptProcess:
    """Start torchrun with `ranks` ranks on the training pool."""
    command = module("models.training.launch", folder.path, "--ranks", str(ranks))
    return KeptProcess(partial(pool.launch, "trainer", command, threads=threads, processes=ranks))
