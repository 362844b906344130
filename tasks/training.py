"""Starts store, generators and trainer, follows the training, and exports the draft."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from prefect import get_run_logger

from infra.data_plane.bottleneck import Elasticity
from infra.data_plane.elastic_generators import ElasticGenerators
from infra.data_plane.start import start_generator, start_trainer
from infra.data_plane.watch import RunWatch, check_quarantined
from infra.network.ports import machine_address
from infra.pools.base import Pool
from infra.processes.keep_running import Generators, KeptProcess, follow
from infra.records.data_path import TrainingResult
from infra.records.drafts import ExportRecord
from infra.settings import shared_memory_folder
from infra.transport.choice import objects_folder
from infra.transport.mooncake.store import start_store
from tasks.pools import on_cpu, run_main, single_pools, span_of
from tasks.run import OpenRun
from tasks.side_effects import side_effect
from tasks.training_shown import ShownTraining


@side_effect("train", retries=0)
def train(run: OpenRun, pool: Pool, generators: Generators, store: Sequence[KeptProcess]) -> TrainingResult:
    """Train to the end; a crashed process is restarted and continues from the ledger.

    There is no time limit here: the trainer gives up by itself when no samples come (training.stall_s), and the watch
    gives up on a trainer that hangs.
    """
    follow_trainer(run, pool, generators, store)
    return TrainingResult.read(run.folder.training)


def follow_trainer(run: OpenRun, pool: Pool, generators: Generators, store: Sequence[KeptProcess]) -> None:
    """Start the trainer and follow it to its end, with the generators and services that it needs."""
    settings, logger = run.config.training, get_run_logger()
    machines, address = run.config.pools.training_machines, machine_address(run.config.transport.address)
    trainer = start_trainer(pool, run.folder, settings.ranks, settings.threads, machines, address)
    with closing(trainer), run.open_ledger() as ledger, ShownTraining(run) as shown:
        max_quarantined = run.config.ledger.max_quarantined
        checks = [RunWatch(ledger, 2 * run.config.stall_s, max_quarantined).check, shown.catch_up]
        follow(trainer, generators, logger.info, logger.warning, checks, store)
        check_quarantined(ledger, max_quarantined)  # a short run ends before anybody has looked


@side_effect("start generators", retries=0)
def start_generators(run: OpenRun, pool: Pool) -> ElasticGenerators:
    """Start the configured number of generators on the inference pool; the pool's release stops them too."""
    settings, span, generators = run.config.generator, span_of(run), []
    with run.open_ledger() as ledger:
        ledger.reopen()
    for index in range(settings.count):
        generators.append(start_generator(pool, run.folder, index, settings.count, settings.threads, span))
        get_run_logger().info("generator-%d: log in %s", index, generators[-1].process.log)
    here = run.config.pools.kind == "local"

    def start(own: Pool, index: int) -> KeptProcess:
        sharing = settings.most if here else 1
        return start_generator(own, run.folder, index, sharing, settings.threads, span, alone=True)

    elasticity = Elasticity(settings.count, settings.most, settings.patience_s)
    # On this machine another place is the same place: what cannot run there is left out.
    return ElasticGenerators(run.folder, generators, start, single_pools(run), elasticity, replaces=not here)


@contextmanager
def storing(run: OpenRun, pool: Pool) -> Iterator[list[KeptProcess]]:
    """The store's processes; none for transports of one machine.

    The master runs on the flow's machine: transport.address names it, and nobody knows the trainer's before. The
    memory is on the trainer's machines, a part on each.
    """
    settings, pools = run.config.transport, run.config.pools
    if settings.kind != "mooncake":
        yield []
        return
    here, say = pools.kind == "local", get_run_logger().info
    folder = objects_folder(settings, run.folder) if here else Path(settings.folder or shared_memory_folder())
    with start_store(
        on_cpu(run), run.folder, settings, folder, say, holders=pool, parts=pools.training_machines
    ) as store:
        yield store


EXPORT_TIMEOUT_S = 3600.0


@side_effect("export draft", retries=1)
def export_draft(run: OpenRun) -> ExportRecord:
    """Write the final checkpoint as a Hugging Face folder that SGLang and vLLM read, with a model card."""
    run_main(run, on_cpu(run), "export", "models.export.sglang", timeout_s=EXPORT_TIMEOUT_S)
    return ExportRecord.read(run.folder.exported)
