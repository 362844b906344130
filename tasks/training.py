"""Trains the draft: the trainer's ranks run beside the generators that feed them."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from httpx import HTTPError
from mlflow.exceptions import MlflowException
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from infra.data_plane.bottleneck import StallWatch
from infra.data_plane.start import start_trainer
from infra.files.lines import last_object
from infra.ledger.quarantine_limit import QuarantineLimit
from infra.pools.base import Pool
from infra.processes.keep_running import Generators, KeptProcess, follow
from infra.records.data_path import TrainingResult
from infra.tracking.runs import log_new_metrics
from tasks.artifact_keys import artifact_key
from tasks.data_plane import side_effect
from tasks.run import OpenRun

TRACKING_S = 15.0


@side_effect("train", retries=0)
def train(run: OpenRun, pool: Pool, generators: Generators, store: Sequence[KeptProcess]) -> TrainingResult:
    """Train to the end; whichever process crashes is started again and goes on from the ledger.

    There is no time limit here: the trainer gives up by itself when no samples come (training.stall_s), and the watch
    gives up on a trainer that hangs.
    """
    settings, logger = run.config.training, get_run_logger()
    trainer = start_trainer(pool, run.folder, settings.ranks, settings.threads)
    with closing(trainer), run.open_ledger() as ledger:
        watch, shown = StallWatch(ledger, 2 * settings.stall_s), _Shown(run)
        quarantined = QuarantineLimit(ledger, run.config.ledger.max_quarantined)
        checks = [watch.check, quarantined.look, shown.catch_up]
        follow(trainer, generators, logger.info, logger.warning, checks, store)
        quarantined.check()  # a short run ends before anybody has looked
        shown.catch_up(at_once=True)
    return TrainingResult.read(run.folder.training)


class _Shown:
    """What others see of a training on its way: a progress bar in Prefect, curves in MLflow.

    Both are a convenience: a server that is away must not cost the training.
    """

    def __init__(self, run: OpenRun):
        self._run, self._looked, self._bar = run, 0.0, None

    def catch_up(self, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._looked < TRACKING_S:
            return
        self._looked = time.monotonic()
        metrics = self._run.folder.metrics
        try:
            self._advance(metrics)
            log_new_metrics(self._run.tracking_record, metrics)
        except (MlflowException, HTTPError) as error:
            get_run_logger().warning("metrics stay behind in %s for now: %s", metrics, error)

    def _advance(self, metrics: Path) -> None:
        last = last_object(metrics) or {"step": 0, "total_steps": 1}
        percent = 100.0 * last["step"] / last["total_steps"]
        if self._bar is None:
            description = f"Optimizer steps of {self._run.folder.name}"
            self._bar = create_progress_artifact(
                percent, key=artifact_key("training-progress", self._run.config.name), description=description
            )
        else:
            update_progress_artifact(self._bar, percent)  # pyright: ignore[reportArgumentType]
