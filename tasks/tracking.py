"""Opens and closes the run in MLflow, and logs its samples."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from getpass import getuser
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from infra.provenance import git_sha, hardware, versions
from infra.records.data_path import SamplesRecord
from infra.tracking.client import NOTE
from infra.tracking.runs import (
    TrackedRun,
    end_run,
    log_checkpoint,
    log_new_metrics,
    log_samples,
    logged_checkpoints,
    start_run,
)
from tasks.data_plane import side_effect
from tasks.run import OpenRun


@contextmanager
def tracked(run: OpenRun) -> Iterator[TrackedRun]:
    """The MLflow run of this run; it ends as FINISHED, FAILED, or (interrupted, cancelled) KILLED."""
    with ExitStack() as stack:
        tracking = open_tracking(run)
        stack.push(lambda kind, *_: end_run(tracking, _status(kind)))
        yield tracking


def _status(kind: type[BaseException] | None) -> str:
    if kind is None:
        return "FINISHED"
    return "FAILED" if issubclass(kind, Exception) else "KILLED"


@side_effect("open tracking")
def open_tracking(run: OpenRun) -> TrackedRun:
    """Start the MLflow run with configuration, code, versions and hardware, or go on with the one there is.

    The flow run is given the run's name: all pages then speak of the same thing.
    """
    tags = {
        "target": run.config.target.name,
        "git_sha": git_sha(),
        "hardware": hardware(),
        **versions(),
        "mlflow.user": _user(),
        "mlflow.source.name": f"draftsmith retrain {run.folder.name}",
        "mlflow.source.type": "JOB",
        NOTE: f"Trains a draft for {run.config.target.name}. What the run came to is written here when it has ended.",
    }
    if flow_run.id:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run.id), name=run.folder.name)
        tags["prefect.flow_run"] = url_for("flow-run", obj_id=flow_run.id) or str(flow_run.id)
    config = run.config.model_dump(mode="json")
    tracking = start_run(
        run.tracking_record, run.tracking_uri, run.config.tracking.experiment, run.folder.name, config, tags
    )
    get_run_logger().info("MLflow run %s at %s", tracking.run_id, tracking.uri)
    return tracking


def _user() -> str:
    try:
        return getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"


@side_effect("track samples")
def track_samples(run: OpenRun, tracking: TrackedRun, samples: SamplesRecord) -> None:
    """Log the sample set with its hash."""
    log_samples(tracking, run.config.data.source, samples)


@side_effect("track training")
def track_training(run: OpenRun, tracking: TrackedRun) -> None:
    """Log the metrics that are still missing, and every committed checkpoint as a logged model."""
    log_new_metrics(run.tracking_record, run.folder.metrics)
    logged = logged_checkpoints(tracking)
    with run.open_ledger() as ledger:
        committed = ledger.checkpoints()
    for record in committed:
        folder = run.folder.path / record.path
        if folder.is_dir() and record.step not in logged:
            log_checkpoint(tracking, folder, record.step, run.folder.metrics)
