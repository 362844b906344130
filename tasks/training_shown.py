"""What others see of a training on its way: a progress bar in Prefect, curves in MLflow."""

import time
from contextvars import copy_context
from pathlib import Path
from threading import Thread

from httpx import HTTPError
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from infra.files.lines import last_object
from infra.tracking.client import REGISTRY_ERRORS
from infra.tracking.runs import log_new_metrics
from tasks.run import OpenRun
from tasks.side_effects import artifact_key

EVERY_S = 15.0
LAST_S = 30.0


class ShownTraining:
    """Shows a training, from a thread: a server that hangs must not hold up whoever watches the run's processes.

    It is a convenience: a server that is away must not cost the training.
    """

    def __init__(self, run: OpenRun):
        self._run, self._begun, self._bar = run, 0.0, None
        self._showing = Thread()

    def catch_up(self) -> None:
        """Begin to show what is new, if that is due and a server does not still hold up the last time."""
        if time.monotonic() - self._begun >= EVERY_S and not self._showing.is_alive():
            self._begin()

    def finish(self) -> None:
        """Show the rest, for half a minute at most; the flow logs what stays behind to MLflow once more."""
        deadline = time.monotonic() + LAST_S
        if self._begun:
            self._showing.join(LAST_S)
        if not self._showing.is_alive():
            self._begin()
            self._showing.join(max(0.0, deadline - time.monotonic()))
        if self._showing.is_alive():
            get_run_logger().warning(
                "Prefect or MLflow does not answer: they do not show the training's last steps yet"
            )

    def _begin(self) -> None:
        self._begun = time.monotonic()
        self._showing = Thread(target=copy_context().run, args=(self._show,), daemon=True)
        self._showing.start()

    def _show(self) -> None:
        metrics = self._run.folder.metrics
        try:
            self._advance(metrics)
            log_new_metrics(self._run.tracking_record, metrics)
        except (*REGISTRY_ERRORS, HTTPError) as error:
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
