"""Bounds what MLflow keeps of a draft's runs: checkpoints, old versions, old runs.

Weights are removed from the artifact store at once. MLflow only marks rows as deleted (its trash); `mlflow gc` removes
them, and needs the database itself, not only the server.
"""

import hashlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from infra.files.atomic import write_atomically
from infra.records.acceptance import RegisteredDraft
from infra.tracking.client import active_experiments, connect, pages
from infra.tracking.registry import REPLACES, list_drafts
from infra.tracking.runs import FOLDER, RUNS

OURS = "tags.`mlflow.source.name` LIKE 'draftsmith retrain %'"
EXPERIMENTS, IDENTITY = ".experiments", ".identity"
KIND = "draftsmith.kind"
GROUP = ("tracking.registered_model", "name")
"""The run's parameters by which runs are grouped: registered model and recipe."""
GC_TIMEOUT_S = 1800.0
GC = """
import sys
from mlflow.cli import cli
cli(["gc", "--older-than", sys.argv[1], "--backend-store-uri", sys.stdin.read()])
"""


def note_experiment(runs: Path, name: str) -> None:
    """Note beside the run folders that their runs are tracked in an experiment: `clean-up` looks into no other."""
    write_atomically(runs / EXPERIMENTS / hashlib.sha256(name.encode()).hexdigest()[:16], name)


def noted_experiments(runs: Path) -> list[str]:
    """The experiments in which runs of this folder have been tracked, also those whose folders are gone."""
    return [file.read_text() for file in (runs / EXPERIMENTS).glob("[!.]*")]


def remove_old_tracking(
    uri: str,
    experiments: Collection[str],
    keep_runs: int,
    keep_checkpoints: int,
    resumable: Collection[str] = (),
) -> tuple[int, int]:
    """Keep the newest `keep_runs` runs of every registered model and recipe in these experiments, and the checkpoints
    of the newest `keep_checkpoints` of them.

    A run whose version has an alias, or was replaced by one that has, stays whatever its age, so that it can serve
    and be rolled back to; so does one of which a registered model that is not ours has a version, a copy made by hand,
    and so do those of `resumable`, by their ids, with their checkpoints.
    Returns the numbers of removed runs, with their artifacts and versions, and of checkpoints.
    """
    client, removed_runs, removed_checkpoints = connect(uri), 0, 0
    drafts = list_drafts(uri)
    protected, ours = _protected_runs(client, drafts), {draft.name for draft in drafts}
    for runs in _runs_by_draft(client, experiments).values():
        for age, run in enumerate(runs):
            if run.info.run_id in resumable:
                continue
            versions = _versions_of(client, run) if age >= keep_runs and run.info.run_id not in protected else None
            if versions is not None and ours.issuperset(str(version.name) for version in versions):
                _remove_run(client, run, versions)
                removed_runs += 1
            elif age >= keep_checkpoints:
                removed_checkpoints += _remove_models(client, run, "checkpoint")
    return removed_runs, removed_checkpoints


def identity(runs: Path) -> str:
    """What tells this folder of runs, and copies of it, from others, on whatever machine and path it is seen."""
    file = runs / IDENTITY
    if not file.is_file():
        write_atomically(file, uuid4().hex)
    return file.read_text()


def end_gone_runs(uri: str, experiments: Collection[str], runs: Path) -> int:
    """End the runs that began in this folder of runs and whose own folders are gone, so that nobody can resume them.

    Returns the number of runs.
    """
    client, ended = connect(uri), 0
    for run in _runs(client, experiments):
        name = run.data.tags.get(FOLDER)
        ours = bool(name) and run.info.status == "RUNNING" and run.data.tags.get(RUNS) == identity(runs)
        if ours and not (runs / str(name)).exists():
            client.set_terminated(run.info.run_id, "KILLED")
            ended += 1
    return ended


def empty_trash(uri: str, database: str, days: float) -> None:
    """Remove from MLflow's `database` the rows of everything that was deleted more than `days` ago (`mlflow gc`).

    `uri` is the server's address, through which `gc` removes artifacts that the server proxies. Raises Refusal for a
    damaged file, CalledProcessError with MLflow's own words, and TimeoutExpired.
    """
    connect(uri)
    # The database's address by standard input: it may hold a password, and other users see a command's arguments.
    subprocess.run(
        [sys.executable, "-c", GC, f"{days:g}d"],
        input=database,
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        check=True,
        stderr=subprocess.STDOUT,
        timeout=GC_TIMEOUT_S,
        text=True,
    )


def _protected_runs(client: MlflowClient, drafts: Sequence[RegisteredDraft]) -> set[str]:
    wanted = {(draft.name, str(draft.version)) for draft in drafts if draft.aliases}
    wanted |= {(draft.name, draft.tags.get(REPLACES, "")) for draft in drafts if draft.aliases}
    # The version that a champion replaced may have been deleted, by hand or by an earlier clean-up, or its number may
    # have been edited.
    wanted &= {(draft.name, str(draft.version)) for draft in drafts}
    return {str(client.get_model_version(name, version).run_id) for name, version in wanted}


def _runs_by_draft(client: MlflowClient, experiments: Collection[str]) -> dict[tuple[str | None, ...], list[Run]]:
    """Ended runs, the newest first, by the values of `GROUP`."""
    groups: dict[tuple[str | None, ...], list[Run]] = defaultdict(list)
    for run in _runs(client, experiments):
        if run.info.status != "RUNNING":
            groups[tuple(map(run.data.params.get, GROUP))].append(run)
    return groups


def _runs(client: MlflowClient, experiments: Collection[str]) -> list[Run]:
    """Our runs in these experiments, the newest first."""
    ids = [str(one.experiment_id) for one in active_experiments(client, experiments)]
    query = {"filter_string": OURS, "order_by": ["attributes.start_time DESC"]}
    return list(pages(client.search_runs, experiment_ids=ids, **query)) if ids else []


def _versions_of(client: MlflowClient, run: Run) -> list[ModelVersion]:
    return list(pages(client.search_model_versions, filter_string=f"run_id = '{run.info.run_id}'"))


def _remove_run(client: MlflowClient, run: Run, versions: Sequence[ModelVersion]) -> None:
    """Remove versions first, so that none is left without weights; the run last, so that an interruption shows."""
    for version in versions:
        client.delete_model_version(str(version.name), str(version.version))
    for kind in ("checkpoint", "draft"):
        _remove_models(client, run, kind)
    get_artifact_repository(str(run.info.artifact_uri), client.tracking_uri).delete_artifacts()
    client.delete_run(run.info.run_id)


def _remove_models(client: MlflowClient, run: Run, kind: str) -> int:
    query = f"source_run_id = '{run.info.run_id}' AND model_type = '{kind}'"
    found: Sequence[LoggedModel] = [
        model
        for model in pages(client.search_logged_models, experiment_ids=[run.info.experiment_id], filter_string=query)
        if model.tags.get(KIND) == kind
    ]
    for model in found:
        get_artifact_repository(str(model.artifact_location), client.tracking_uri).delete_artifacts()
        client.delete_logged_model(str(model.model_id))
    return len(found)
