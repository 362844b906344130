"""Bounds what MLflow keeps of a draft's runs: checkpoints, old versions, old runs.

Weights are removed from the artifact store at once. MLflow only marks rows as deleted (its trash); `mlflow gc` removes
them, and needs the database itself, not only the server.
"""

import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from infra.processes.process import module
from infra.tracking.client import connect, pages
from infra.tracking.registry import REPLACES, list_drafts

OURS = "tags.`mlflow.source.name` LIKE 'draftsmith retrain %'"
KIND = "draftsmith.kind"
RECIPE = "name"
"""The run's parameter by which runs are grouped: the recipe's name."""
GC_TIMEOUT_S = 1800.0


def remove_old_tracking(uri: str, keep_runs: int, keep_checkpoints: int) -> tuple[int, int]:
    """Keep the newest `keep_runs` runs of every recipe, and the checkpoints of the newest `keep_checkpoints` of them.

    A run whose version has an alias, or was replaced by one that has, stays whatever its age, so that it can serve
    and be rolled back to. Returns the numbers of removed runs, with their artifacts and versions, and of checkpoints.
    """
    client, removed_runs, removed_checkpoints = connect(uri), 0, 0
    protected = _protected_runs(client, uri)
    for runs in _runs_by_recipe(client).values():
        for age, run in enumerate(runs):
            if age >= keep_runs and run.info.run_id not in protected:
                _remove_run(client, uri, run)
                removed_runs += 1
            elif age >= keep_checkpoints:
                removed_checkpoints += _remove_models(client, run, "checkpoint")
    return removed_runs, removed_checkpoints


def empty_trash(database: str, days: float) -> None:
    """Remove from MLflow's `database` the rows of everything that was deleted more than `days` ago (`mlflow gc`).

    Raises CalledProcessError with MLflow's own words, and TimeoutExpired.
    """
    # By environment, not by option: the address may hold a password, and options are visible to other users. As the
    # tracking address, because `gc` does not read the variable of the backend store.
    environment = {**os.environ, "MLFLOW_TRACKING_URI": database}
    command = [*module("mlflow", "gc"), "--older-than", f"{days:g}d"]
    subprocess.run(command, env=environment, check=True, stderr=subprocess.STDOUT, timeout=GC_TIMEOUT_S)


def _protected_runs(client: MlflowClient, uri: str) -> set[str]:
    drafts = list_drafts(uri)
    wanted = {(draft.name, draft.version) for draft in drafts if draft.aliases}
    wanted |= {
        (draft.name, int(draft.tags[REPLACES])) for draft in drafts if draft.aliases and draft.tags.get(REPLACES)
    }
    return {str(client.get_model_version(name, str(version)).run_id) for name, version in wanted}


def _runs_by_recipe(client: MlflowClient) -> dict[tuple[str, str], list[Run]]:
    """Ended runs, the newest first."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    experiments = [str(one.experiment_id) for one in pages(client.search_experiments)]
    query = {"filter_string": OURS, "order_by": ["attributes.start_time DESC"]}
    for run in pages(client.search_runs, experiment_ids=experiments, **query) if experiments else ():
        if run.info.status != "RUNNING":
            groups[run.info.experiment_id, run.data.params.get(RECIPE, "")].append(run)
    return groups


def _remove_run(client: MlflowClient, uri: str, run: Run) -> None:
    """Remove versions first, so that none is left without weights; the run last, so that an interruption shows."""
    for version in pages(client.search_model_versions, filter_string=f"run_id = '{run.info.run_id}'"):
        client.delete_model_version(str(version.name), str(version.version))
    for kind in ("checkpoint", "draft"):
        _remove_models(client, run, kind)
    get_artifact_repository(str(run.info.artifact_uri), uri).delete_artifacts()
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
