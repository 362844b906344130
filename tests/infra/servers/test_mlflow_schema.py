"""MLflow's schema after an upgrade of MLflow."""

import runpy
from pathlib import Path

import pytest
from alembic import command
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils
from mlflow.store.tracking.dbmodels.initial_models import Base


def test_an_outdated_schema_is_upgraded(path_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{path_in_memory / 'mlflow.db'}"
    engine = utils.create_sqlalchemy_engine_with_retry(uri)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:  # as MLflow does, to the schema before the latest
        config = utils._get_alembic_config(uri)
        config.attributes["connection"] = connection
        command.upgrade(config, "head-1")
    with pytest.raises(MlflowException, match="out-of-date database schema"):
        utils._verify_schema(engine)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", uri)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("infra.servers.mlflow_schema", run_name="__main__")
    utils._verify_schema(engine)
