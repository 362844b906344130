"""Capture and training in turns, where generators and trainer have the same devices (pools.sharing=alternate).

The trainer has the first turn: it takes the run over and trains what is captured, also after a crash. Every turn ends
with its processes, so the other side finds the devices empty.
"""

from collections.abc import Sequence
from functools import partial

from prefect import get_run_logger

from infra.data_plane.rounds import follow_capture
from infra.data_plane.start import start_generator
from infra.data_plane.watch import RunWatch
from infra.pools.base import Pool
from infra.processes.keep_running import Generators, KeptProcess
from infra.records.data_path import TrainingResult
from tasks.run import OpenRun
from tasks.side_effects import side_effect
from tasks.training import follow_trainer


@side_effect("train a round", retries=0)
def train_round(run: OpenRun, pool: Pool, store: Sequence[KeptProcess]) -> TrainingResult | None:
    """Train all that is captured; None unless the run is finished with it."""
    follow_trainer(run, pool, Generators(), store)
    with run.open_ledger() as ledger:
        return TrainingResult.read(run.folder.training) if ledger.finished() else None


@side_effect("capture a round", retries=0)
def capture_round(run: OpenRun, pool: Pool, store: Sequence[KeptProcess]) -> None:
    """Capture until the round's bytes are full or the epoch is captured."""
    config, logger = run.config, get_run_logger()
    count, threads = config.generator.count, config.generator.threads
    starts = [partial(start_generator, pool, run.folder, index, count, threads) for index in range(count)]
    with run.open_ledger() as ledger:
        watch = RunWatch(ledger, 2 * config.training.stall_s, config.ledger.max_quarantined)
        follow_capture(ledger, starts, logger.info, logger.warning, watch.check, store)
