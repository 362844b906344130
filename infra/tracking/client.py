"""The way into MLflow: a quiet client, and a SQLite database that several processes may create at once.

Used by the flow's process and the command line.
"""

import logging
import os
from pathlib import Path

from infra.locks import hold
from infra.settings import tracking_uri
from infra.shareable import without_passwords

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
from mlflow import MlflowClient

SQLITE = "sqlite:///"
CREATION_S = 120.0
NOTE = "mlflow.note.content"
"""The tag that MLflow's pages show as the description, in Markdown."""


def connect(uri: str) -> MlflowClient:
    """A client of the tracking server or SQLite file at `uri`; a missing file is created, by one process at a time.

    An address whose password is hidden, as run folders keep it, is the environment's.
    """
    if uri == without_passwords(tracking_uri()):
        uri = tracking_uri()
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    mlflow.set_tracking_uri(uri)  # the SQLite registry looks logged models up through the global address
    if not uri.startswith(SQLITE):
        return MlflowClient(uri, uri)
    database = Path(uri.removeprefix(SQLITE))
    with hold(database.with_name(f".{database.name}.lock"), wait_s=CREATION_S):
        return MlflowClient(uri, uri)  # makes the tables


def experiment_id(client: MlflowClient, name: str) -> str:
    """The experiment's id; it is created where missing, a SQLite file's with its artifacts beside the file."""
    found = client.get_experiment_by_name(name)
    if found:
        return str(found.experiment_id)
    uri = client.tracking_uri
    if not uri.startswith(SQLITE):
        return str(client.create_experiment(name))
    database = Path(uri.removeprefix(SQLITE)).absolute()
    with hold(database.with_name(f".{database.name}.lock"), wait_s=CREATION_S):
        found = client.get_experiment_by_name(name)
        artifacts = database.with_name(f"{database.stem}-artifacts")
        return str(found.experiment_id if found else client.create_experiment(name, artifacts.as_uri()))
