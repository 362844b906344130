"""What others see of a training on its way: curves in MLflow, a progress bar in Prefect."""

import time
from contextvars import copy_context
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

from httpx import HTTPError
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from infra.files.lines import last_object
from infra.tracking.client import REGISTRY_ERRORS
from infra.tracking.runs import log_new_metrics
from tasks.run import OpenRun
from tasks.side_effects import artifact_key

EVERY_S = 15.0
LAST_S, FAILED_S = 15.0, 2.0
"""How long the end waits for what is being shown, after a training that ended well and one that did not."""


class ShownTraining:
    """Shows a training, from a thread: a server that hangs must not hold up whoever watches the run's processes.

    It is a convenience: a server that is away must not cost the training. What stays behind is logged to MLflow by
    a later task.
    """

    def __init__(self, run: OpenRun):
        self._run, self._begun, self._bar = run, 0.0, None
        self._showing = Thread()

    def catch_up(self) -> None:
        """Begin to show what is new, if that is due and a server does not still hold up the last time."""
        if time.monotonic() - self._begun >= EVERY_S and not self._showing.is_alive():
            self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """Show the rest of a training that ended well."""
        deadline = time.monotonic() + (LAST_S if kind is None else FAILED_S)
        if self._showing.is_alive():
            self._showing.join(deadline - time.monotonic())
        if kind is None and not self._showing.is_alive():
            self._begin()
            self._showing.join(max(0.0, deadline - time.monotonic()))

    def _begin(self) -> None:
        self._begun = time.monotonic()
        self._showing = Thread(target=copy_context().run, args=(self._show,), daemon=True)
        self._showing.start()

    def _show(self) -> None:
        metrics = self._run.folder.metrics
        try:
            self._advance(metrics)
        except HTTPError as error:
            self._bar = None  # it may have been deleted
            get_run_logger().warning("the progress bar in Prefect stays behind for now: %s", error)
        except RuntimeError as error:  # of httpx: the flow has ended, and its client is closed
            print(f"{self._run.folder.name}: its progress is not shown to the end: {error}", flush=True)
        try:
            log_new_metrics(self._run.tracking_record, metrics)
        except REGISTRY_ERRORS as error:
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
