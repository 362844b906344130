"""Trains the draft: torchrun in a process group of its own, beside the generators that feed it."""

import time
from collections.abc import Sequence
from contextlib import closing

from mlflow.exceptions import MlflowException
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from infra.bottleneck import StallWatch
from infra.data_plane import start_trainer
from infra.keep_running import KeptProcess, follow
from infra.pools.base import Pool
from infra.records import TrainingResult
from infra.tracking.runs import log_new_metrics
from tasks.run import OpenRun

TRACKING_S = 15.0


@task(name="train", cache_policy=NO_CACHE)
def train(run: OpenRun, pool: Pool, generators: Sequence[KeptProcess]) -> TrainingResult:
    """Train to the end; a trainer or generator that crashes is started again and goes on from the ledger.

    There is no time limit here: the trainer gives up by itself when no samples come (training.stall_s), and the watch
    gives up on a trainer that hangs.
    """
    settings, logger = run.config.training, get_run_logger()
    trainer = start_trainer(pool, run.folder, settings.ranks, settings.threads)
    with closing(trainer), run.open_ledger() as ledger:
        watch = StallWatch(ledger, 2 * settings.stall_s)
        follow(trainer, generators, logger.info, logger.warning, [watch.check, _Tracking(run).catch_up])
    log_new_metrics(run.tracking_record, run.folder.metrics)
    return TrainingResult.read(run.folder.training)


class _Tracking:
    """Metrics on the way are a convenience: a tracking server that is away must not cost the training."""

    def __init__(self, run: OpenRun):
        self._run, self._tracked = run, time.monotonic()

    def catch_up(self) -> None:
        if time.monotonic() - self._tracked < TRACKING_S:
            return
        self._tracked = time.monotonic()
        try:
            log_new_metrics(self._run.tracking_record, self._run.folder.metrics)
        except MlflowException as error:
            metrics = self._run.folder.metrics
            get_run_logger().warning("metrics stay behind in %s for now: %s", metrics, error)
