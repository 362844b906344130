"""Trains the draft: torchrun in a process group of its own, beside the generators that feed it."""

import time
from collections.abc import Sequence

from mlflow.exceptions import MlflowException
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from infra.pools.base import Pool
from infra.processes import Process, module
from infra.records import TrainingResult
from infra.tracking.runs import log_new_metrics
from tasks.data_plane import forward, worth_retrying
from tasks.run import OpenRun

POLL_S = 0.5
TRACKING_S = 15.0


@task(name="train", retries=2, retry_delay_seconds=2, retry_condition_fn=worth_retrying, cache_policy=NO_CACHE)
def train(run: OpenRun, pool: Pool, generators: Sequence[Process]) -> TrainingResult:
    """Train to the end. A retry resumes from the ledger; a generator's death is an error that names its log.

    There is no time limit here: the trainer gives up by itself when no samples come (training.stall_s).
    """
    ranks = run.config.training.ranks
    torchrun = ("--standalone", "--nproc-per-node", str(ranks), "-m", "models.training.trainer")
    command = module("torch.distributed.run", *torchrun, run.folder.path)
    trainer = pool.launch("trainer", command, threads=run.config.training.threads, processes=ranks)
    try:
        _follow(run, trainer, generators)
    finally:
        trainer.stop()
    log_new_metrics(run.tracking_record, run.folder.metrics)
    return TrainingResult.read(run.folder.training)


def _follow(run: OpenRun, trainer: Process, generators: Sequence[Process]) -> None:
    tracked = time.monotonic()
    ended = False
    while not ended:
        for generator in generators:
            generator.check()
        ended = trainer.poll() is not None
        forward(trainer)
        trainer.check()
        if not ended and time.monotonic() - tracked > TRACKING_S:
            _track(run)
            tracked = time.monotonic()
        time.sleep(0 if ended else POLL_S)


def _track(run: OpenRun) -> None:
    """Metrics on the way are a convenience: a tracking server that is away must not cost the training."""
    try:
        log_new_metrics(run.tracking_record, run.folder.metrics)
    except MlflowException as error:
        get_run_logger().warning("metrics stay behind in %s for now: %s", run.folder.metrics, error)
