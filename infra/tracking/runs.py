"""What MLflow remembers of one run: configuration, data, metrics over steps, checkpoints, benchmark.

Checkpoints and drafts are logged models without a flavour: safetensors and JSON, no pickle.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from infra.files.atomic import write_atomically
from infra.files.lines import read_objects
from infra.records.acceptance import RegisteredDraft
from infra.records.data_path import HELDOUT_LENGTH, HELDOUT_SEEN, Record
from infra.redaction import redacted
from infra.refusal import Refusal
from infra.tracking.client import NOTE, connect, experiment_id, pages, quoted

BATCH = 500
"""MLflow takes at most 1,000 metrics and 100 parameters in a request."""
WEIGHTS = ("*.safetensors", "*.json")
"""Files of a logged checkpoint; the optimizer's state stays in the run folder."""
RUNS, FOLDER = "draftsmith.runs", "draftsmith.folder"
"""Tags: which folder of runs a run is in (`infra.tracking.retention.identity`), and the name of its own there."""
HEADLINES = ("loss", "learning_rate", HELDOUT_LENGTH, HELDOUT_SEEN)
"""Metrics outside any group: MLflow shows them first."""
EXPERIMENT_NOTE = (
    "Each run trains a draft, proves it by speculative decoding and registers it. Choose *Model training* at the top "
    "left; a run's description says what it came to, its artifact `report.html` shows everything, and the registered "
    "model's aliases say which version serves (`champion`) and which one wants to (`challenger`)."
)


class TrackedRun(Record):
    """A run of MLflow, as the run folder remembers it."""

    uri: str
    """Address without a password; `connect` adds the environment's."""
    experiment_id: str
    run_id: str
    logged_step: int = 0
    """Metrics up to this step are in MLflow."""


def start_run(
    record: Path, uri: str, experiment: str, name: str, config: Mapping[str, Any], tags: Mapping[str, str]
) -> TrackedRun:
    """Open the run that the file `record` remembers, or a new one with `config` as its parameters.

    One that was deleted in MLflow is restored. Passwords in the configuration's addresses are not logged. Raises
    Refusal where MLflow does not have that run.
    """
    client = connect(uri)
    if record.exists():
        run = _continued(client, record, redacted(uri), tags)
    else:
        run = _created(client, record, redacted(uri), experiment, name, tags)
    _log_config(client, run, redacted(config))
    return run


def _created(
    client: MlflowClient, record: Path, uri: str, experiment: str, name: str, tags: Mapping[str, str]
) -> TrackedRun:
    """A new run, which `record` remembers. A second try finds one whose creation was not answered by its folder."""
    experiment_of_run = experiment_id(client, experiment)
    if NOTE not in client.get_experiment(experiment_of_run).tags:
        client.set_experiment_tag(experiment_of_run, NOTE, EXPERIMENT_NOTE)
    if not (made := _runs_of_folder(client, experiment_of_run, tags)):
        now = int(time.time() * 1000)
        created = client.create_run(experiment_of_run, start_time=now, run_name=name, tags=dict(tags))
        made = _runs_of_folder(client, experiment_of_run, tags) or [created]
    first = made[0]
    for other in made[1:]:
        # MLflow's client repeats a request whose answer was lost, so it may have made several runs.
        if other.info.start_time == first.info.start_time and not other.data.params:
            client.delete_run(other.info.run_id)
    client.update_run(first.info.run_id, status="RUNNING")
    run = TrackedRun(uri=uri, experiment_id=experiment_of_run, run_id=first.info.run_id)
    write_atomically(record, run)
    return run


def _runs_of_folder(client: MlflowClient, experiment: str, tags: Mapping[str, str]) -> list[Run]:
    """Runs of MLflow that are of the run folder in `tags`: newest first, those with a configuration before others."""
    if FOLDER not in tags:
        return []
    query = f"tags.`{FOLDER}` = {quoted(tags[FOLDER])} AND tags.`{RUNS}` = {quoted(tags[RUNS])}"
    found = pages(client.search_runs, experiment_ids=[experiment], filter_string=query)
    return sorted(found, key=lambda run: (run.info.start_time, bool(run.data.params)), reverse=True)


def _log_config(client: MlflowClient, run: TrackedRun, config: Mapping[str, Any]) -> None:
    """Log what the run does not have yet. MLflow takes no second value of a parameter: a resumed run's placement may be
    another one."""
    logged = client.get_run(run.run_id).data.params
    parameters = [Param(key, str(value)) for key, value in _flat(config) if key not in logged]
    for start in range(0, len(parameters), 100):
        client.log_batch(run.run_id, params=parameters[start : start + 100])
    client.log_dict(run.run_id, dict(config), "config.json")


def restore(run: TrackedRun) -> None:
    """Take a run that goes on out of MLflow's trash, if a person has deleted it."""
    _restore(connect(run.uri), run.run_id)


def _restore(client: MlflowClient, run_id: str) -> None:
    if client.get_run(run_id).info.lifecycle_stage == "deleted":
        client.restore_run(run_id)


def _continued(client: MlflowClient, record: Path, uri: str, tags: Mapping[str, str]) -> TrackedRun:
    """The run of `record`, which notes `uri` if MLflow has moved there, and MLflow where the run goes on."""
    run = TrackedRun.read(record)
    try:
        _restore(client, run.run_id)
        client.update_run(run.run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise Refusal(
            f"MLflow at {uri} has no run {run.run_id}, which {record} names: "
            + ("restore it there" if run.uri == uri else f"set tracking.uri or $MLFLOW_TRACKING_URI to {run.uri}")
            + ", or start a new run"
        ) from error
    for key in (RUNS, FOLDER):
        if key in tags:
            client.set_tag(run.run_id, key, tags[key])
    if run.uri != uri:
        run = run.model_copy(update={"uri": uri})
        write_atomically(record, run)
    return run


def describe_run(run: TrackedRun, note: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
    """Give the run its description (Markdown), further tags, and its reports as artifacts."""
    client = connect(run.uri)
    client.log_batch(run.run_id, tags=[RunTag(key, value) for key, value in {**tags, NOTE: note}.items()])
    for file in files:
        client.log_artifact(run.run_id, str(file))


def end_run(run: TrackedRun, status: str) -> None:
    """Close the run as FINISHED, FAILED or KILLED."""
    connect(run.uri).set_terminated(run.run_id, status)


def log_new_metrics(record: Path, metrics: Path) -> None:
    """Log the steps that `metrics` (one JSON object per line) has gained, and note each request's in `record`."""
    run = TrackedRun.read(record)
    new = [line for line in read_objects(metrics) if line["step"] > run.logged_step]
    if not new:
        return
    client = connect(run.uri)
    at_once = max(1, BATCH // max(1, *(len(list(_points(line))) for line in new)))
    for start in range(0, len(new), at_once):
        lines = new[start : start + at_once]
        client.log_batch(run.run_id, metrics=[point for line in lines for point in _points(line)])
        # Each time: the next request may fail, and whoever tries again must not log these points twice. Another thread
        # may be further by now.
        noted = TrackedRun.read(record)
        if noted.logged_step < lines[-1]["step"]:
            write_atomically(record, noted.model_copy(update={"logged_step": lines[-1]["step"]}))


def _points(line: dict[str, Any]) -> Iterator[Metric]:
    # Lines that earlier versions wrote have no time.
    milliseconds = int(line.get("time", time.time()) * 1000)
    step = int(line["step"])
    for key, value in line.items():
        if key == "acceptance_by_position":
            for position, rate in enumerate(value, start=1):
                yield Metric(f"training_acceptance/position_{position}", float(rate), milliseconds, step)
        elif key not in ("step", "time") and isinstance(value, int | float):
            yield Metric(key if key in HEADLINES else f"data_path/{key}", float(value), milliseconds, step)


def log_checkpoint(run: TrackedRun, folder: Path, step: int, metrics: Path) -> str:
    """Log a committed checkpoint's weights as a logged model, with the metrics of its step; return its id."""
    model_id = log_folder(run, folder, f"checkpoint-{step:06d}", step, "checkpoint", only=WEIGHTS)
    now = int(time.time() * 1000)
    points = [
        Metric(key, value, now, step, model_id, run_id=run.run_id) for key, value in _figures_at(step, metrics).items()
    ]
    if points:
        connect(run.uri).log_batch(run.run_id, metrics=points)
    return model_id


def _figures_at(step: int, metrics: Path) -> dict[str, float]:
    """Loss and acceptance lengths while training, as last reported at or before the step."""
    before = [line for line in reversed(read_objects(metrics)) if line["step"] <= step]
    if not before:
        return {}
    last, heldout = before[0], next((line[HELDOUT_LENGTH] for line in before if HELDOUT_LENGTH in line), None)
    measured = {} if heldout is None else {f"checkpoint/{HELDOUT_LENGTH}": heldout}
    whole = accumulate(last["acceptance_by_position"], mul)  # share of chains that are right up to each position
    return measured | {"checkpoint/loss": last["loss"], "checkpoint/training_acceptance_length": 1.0 + sum(whole)}


def log_folder(
    run: TrackedRun, folder: Path, name: str, step: int, kind: str, *, only: Sequence[str] = (), **parameters: str
) -> str:
    """Log a folder of safetensors and JSON, or its files that match `only`, as a logged model; return its id."""
    client = connect(run.uri)
    tags = {"draftsmith.kind": kind}
    model = client.create_logged_model(
        run.experiment_id, name, run.run_id, tags, {"step": str(step), **parameters}, model_type=kind
    )
    status = "FAILED"
    try:
        for file in (file for pattern in only for file in sorted(folder.glob(pattern))):
            client.log_model_artifact(model.model_id, str(file))
        if not only:
            client.log_model_artifacts(model.model_id, str(folder))
        status = "READY"
    finally:
        client.finalize_logged_model(model.model_id, status)
    client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, step)])
    return str(model.model_id)


def logged_checkpoints(run: TrackedRun) -> set[int]:
    """Steps whose checkpoint is already logged."""
    found = connect(run.uri).search_logged_models(
        [run.experiment_id], filter_string=f"source_run_id = '{run.run_id}' AND model_type = 'checkpoint'"
    )
    return {int(model.params["step"]) for model in found if str(model.status) == "READY"}


def log_benchmark(
    run: TrackedRun,
    model_id: str,
    *,
    metrics: Mapping[str, float],
    curves: Mapping[str, Mapping[int, float]],
    conditions: Mapping[str, Any],
    table: Mapping[str, Sequence[Any]],
    files: Sequence[Path],
    dataset: tuple[str | None, str | None],
) -> None:
    """Log acceptance numbers of one draft, with the conditions under which they hold, a table and the plots.

    `dataset`: name and digest of the data set that they were measured on.

    Figures that stand alone are logged at step 0, which MLflow draws as bars, and a curve's points over their own x
    (a lookahead).
    """
    client = connect(run.uri)
    now = int(time.time() * 1000)
    points = [Metric(key, value, now, 0, model_id, *dataset, run.run_id) for key, value in metrics.items()]
    points += [
        Metric(key, value, now, x, None, *dataset, run.run_id)
        for key, curve in curves.items()
        for x, value in curve.items()
    ]
    client.log_batch(run.run_id, metrics=points)
    client.log_model_params(model_id, {f"conditions.{key}": str(value) for key, value in _flat(conditions)})
    client.log_dict(run.run_id, dict(conditions), "benchmark/conditions.json")
    client.log_dict(run.run_id, dict(table), "benchmark/acceptance.json")
    for file in files:
        client.log_artifact(run.run_id, str(file), "benchmark")


def log_figures(run: TrackedRun, model_id: str, figures: Mapping[str, float]) -> None:
    """Log figures of one draft that no data set decides."""
    now = int(time.time() * 1000)
    points = [Metric(key, value, now, 0, model_id, run_id=run.run_id) for key, value in figures.items()]
    connect(run.uri).log_batch(run.run_id, metrics=points)


def log_model_figures(uri: str, draft: RegisteredDraft, figures: Mapping[str, float]) -> None:
    """Log figures of a registered version, measured long after its run, with its model and the run that made it."""
    client = connect(uri)
    run_id = str(client.get_model_version(draft.name, str(draft.version)).run_id)
    history = client.get_metric_history(run_id, next(iter(figures)))
    now, step = int(time.time() * 1000), len(history)
    points = [Metric(key, value, now, step, draft.model_id, run_id=run_id) for key, value in figures.items()]
    client.log_batch(run_id, metrics=points)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
