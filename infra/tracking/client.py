"""The way into MLflow: a quiet client, a SQLite database that several processes may create at once, paged queries."""

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from infra.files.locks import hold
from infra.files.sqlite_file import is_other_file
from infra.network.health import public, within
from infra.redaction import redacted
from infra.refusal import Refusal, first_line
from infra.settings import tracking_uri, tracking_variable_kept

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
from alembic.util import CommandError
from botocore.exceptions import BotoCoreError, ClientError
from mlflow import MlflowClient
from mlflow.entities import Experiment
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from mlflow.store.entities.paged_list import PagedList
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from requests import Response
from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError

Entity = TypeVar("Entity")
SQLITE = "sqlite:///"
SERVERS = ("http://", "https://")
POSTGRESQL = "postgresql+psycopg://"
"""The only driver of a database server that is installed."""
REMEDY = "correct tracking.uri or $MLFLOW_TRACKING_URI (a server's http:// address, or sqlite:////folder/file.db)"
OLD = re.compile(r"[012]\.\d+\.[\w.]+")
CREATION_S = 600.0
ANSWER_S = 5.0
REGISTRY_ERRORS = (MlflowException, SQLAlchemyError, BotoCoreError, ClientError, OSError, Refusal)
"""What a registry or store that is away, a full disk, or missing settings come to."""
NOTE = "mlflow.note.content"
"""The tag that MLflow's pages show as the description, in Markdown."""


def connect(uri: str) -> MlflowClient:
    """A client of the tracking server or SQLite file at `uri`; a missing file is created, by one process at a time.

    An address whose password is hidden, as run folders keep it, is the environment's.
    """
    if uri == redacted(tracking_uri()):
        uri = tracking_uri()
    uri = _plain(uri)
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    _check(uri)
    with tracking_variable_kept():
        mlflow.set_tracking_uri(uri)  # the SQLite registry looks logged models up through the global address
    try:
        if not uri.startswith(SQLITE):
            return MlflowClient(uri, uri)
        database = Path(uri.removeprefix(SQLITE))
        with hold(database.with_name(f".{database.name}.lock"), wait_s=CREATION_S):
            return MlflowClient(uri, uri)  # makes the tables
    except (MlflowException, DatabaseError, CommandError, ImportError) as error:
        if isinstance(error, OperationalError) and "already exists" not in str(error):
            raise  # locked or full: a fault of the machine, not of a file whose making was interrupted
        raise Refusal(f"MLflow at {uri} cannot be used ({first_line(error)}): {REMEDY}") from error


def _plain(uri: str) -> str:
    """An address as MLflow knows it: without blanks around it, its scheme in lower case."""
    scheme, colon, rest = uri.strip().partition(":")
    return scheme.lower() + colon + rest


def _check(uri: str) -> None:
    """Raise Refusal for an address that MLflow does not understand or cannot use here, and for a file that is not a
    database."""
    if uri.startswith("sqlite:"):
        if not uri.startswith(SQLITE) or uri.removeprefix(SQLITE) in ("", ":memory:"):
            raise Refusal(
                f"MLflow's address {uri!r} names no file (sqlite:///name.db is one in this folder, and "
                f"sqlite:////folder/name.db one anywhere): {REMEDY}"
            )
        database = Path(uri.removeprefix(SQLITE))
        folder = next(parent for parent in database.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise Refusal(f"MLflow's database {database} cannot be made: {folder} is no writable folder: {REMEDY}")
        if database.exists() and not database.is_file():
            raise Refusal(f"MLflow's database {database} is no file: move it away, or {REMEDY}")
        if database.is_file() and is_other_file(database):
            raise Refusal(f"MLflow's database {database} is damaged: restore it or move it away, or {REMEDY}")
    elif uri.startswith(("http:", "https:")):
        if not uri.startswith(SERVERS) or not urlsplit(uri).hostname:
            raise Refusal(f"MLflow's address {uri!r} names no host: {REMEDY}")
    elif uri.startswith(("postgresql", "postgres:")) and not uri.startswith(POSTGRESQL):
        raise Refusal(f"MLflow's address {uri!r} needs a driver that is not installed: begin it with {POSTGRESQL}")
    elif not uri.startswith(POSTGRESQL):
        raise Refusal(f"MLflow's address {uri!r} is of no kind that works here: {REMEDY}")


def check_answers(uri: str) -> None:
    """Raise Refusal where a tracking server does not answer, for which MLflow itself would try for minutes, or does
    not let this user in, and for an address that names none."""
    uri = _plain(uri)
    _check(uri)
    if not uri.startswith(SERVERS):
        return
    if why := why_silent(uri, ANSWER_S):
        raise Refusal(f"MLflow at {public(uri)} does not answer ({why}): start it, or {REMEDY}")
    check_admits(uri)


def check_admits(uri: str) -> None:
    """Raise Refusal where a tracking server does not know this user or is too old, or where something else answers in
    its place.

    One that is away, or fails, is none of these.
    """
    uri = _plain(uri)
    if not uri.startswith(SERVERS):
        return
    try:
        answer = _get(uri, "/api/2.0/mlflow/registered-models/search", ANSWER_S, max_results=1)
        version = _get(uri, "/version", ANSWER_S).text
    except (MlflowException, OSError):
        return
    kind = answer.headers.get("Content-Type", "no content type").partition(";")[0]
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise Refusal(
            f"MLflow at {public(uri)} does not let this user in (401): set $MLFLOW_TRACKING_USERNAME and "
            "$MLFLOW_TRACKING_PASSWORD, or $MLFLOW_TRACKING_TOKEN"
        )
    if answer.status_code in (HTTPStatus.OK, HTTPStatus.NOT_FOUND) and kind != "application/json":
        raise Refusal(
            f"what answers at {public(uri)} is no MLflow server ({answer.status_code}, {kind}): correct tracking.uri "
            "or $MLFLOW_TRACKING_URI, with its path, or set $MLFLOW_TRACKING_TOKEN where a login page stands before it"
        )
    # Not every service has this page.
    if (release := OLD.fullmatch(version.strip())) is not None:
        raise Refusal(
            f"MLflow at {public(uri)} is {release[0]}, and a draft is a logged model, which servers have from 3.0 on: "
            "upgrade it"
        )


def give_up_soon() -> None:
    """Have MLflow's client try twice, for callers that ask again anyway. By default it tries for four minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


def why_silent(uri: str, timeout_s: float) -> str | None:
    """Why a tracking server does not answer within `timeout_s` seconds, in a few words; None when it does.

    It is asked by MLflow's own client, with its credentials and certificates. An answer that denies is one.
    """
    return within(timeout_s, lambda: _ask(uri, timeout_s))


def _ask(uri: str, timeout_s: float) -> str | None:
    try:
        answer = _get(uri, "/health", timeout_s)
    except (MlflowException, OSError) as error:
        return first_line(error.__context__ if isinstance(error.__context__, OSError) else error)
    return None if answer.status_code < 500 else f"it answers {answer.status_code} {answer.reason}"


def _get(uri: str, path: str, timeout_s: float, **parameters: int) -> Response:
    credentials, quick = get_default_host_creds(uri), {"max_retries": 0, "raise_on_status": False}
    answer = http_request(credentials, path, "GET", timeout=timeout_s, params=parameters, **quick)
    assert answer is not None
    return answer


def experiment_id(client: MlflowClient, name: str) -> str:
    """The experiment's id. A missing one is created, with its artifacts next to the file for SQLite.

    Raises Refusal for one that was deleted: its name is taken until MLflow's garbage collection.
    """
    found = client.get_experiment_by_name(name)
    if found and found.lifecycle_stage == "deleted":
        raise Refusal(
            f"the experiment {name} was deleted in MLflow: restore it (`mlflow experiments restore --experiment-id "
            f"{found.experiment_id}`), or give the recipe another one (tracking.experiment)"
        )
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


def active_experiments(client: MlflowClient, names: Collection[str]) -> list[Experiment]:
    """The experiments of these names that exist and are not deleted."""
    found = map(client.get_experiment_by_name, sorted(names))
    return [one for one in found if one and one.lifecycle_stage == "active"]


def pages(search: Callable[..., PagedList[Entity]], **query: Any) -> Iterator[Entity]:
    """Everything that a paged search of MLflow finds."""
    token = None
    while True:
        page = search(page_token=token, **query)
        yield from page
        if not (token := page.token):
            return


def quoted(text: str) -> str:
    """A text as a filter of MLflow has it. One that holds both kinds of quotes cannot be asked for."""
    quote = '"' if "'" in text else "'"
    return f"{quote}{text}{quote}"


def find_model(client: MlflowClient, name: str) -> RegisteredModel:
    """A registered model with its aliases and tags. Raises Refusal if it does not exist."""
    model = get_model(client, name)
    if model is None:
        raise Refusal(f"no draft {name} is registered: `draftsmith drafts list` shows what there is")
    return model


def get_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """A registered model with its aliases and tags, or None."""
    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        return None


def model_versions(client: MlflowClient, name: str) -> Iterator[ModelVersion]:
    """All versions of a registered model, newest first."""
    query = f"name = {quoted(name)}"
    return pages(client.search_model_versions, filter_string=query, order_by=["version_number DESC"])
