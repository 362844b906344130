"""A run that MLflow would not let write at its end is refused at its beginning."""

from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from infra.refusal import Refusal
from infra.tracking.client import connect
from infra.tracking.permissions import check_writable


@pytest.mark.parametrize(
    ("denied", "place"),
    [
        ("draftsmith", "the experiment draftsmith:"),
        ("draftsmith-datasets", "the experiment draftsmith-datasets:"),
        ("draft-x", "the registered model draft-x:"),
    ],
)
def test_what_mlflow_denies_is_named(
    denied: str, place: str, registry_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(registry_uri)
    client.create_registered_model("draft-x")

    def unless_denied(write: Any, name_of: Any) -> Any:
        def checked(self: MlflowClient, at: str, key: str, value: str) -> None:
            if name_of(at) == denied:
                raise MlflowException("Permission denied", PERMISSION_DENIED)
            write(self, at, key, value)

        return checked

    check_writable(registry_uri, "draftsmith", "draft-x", datasets=True)
    by_id = unless_denied(MlflowClient.set_experiment_tag, lambda at: str(client.get_experiment(at).name))
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", by_id)
    by_name = unless_denied(MlflowClient.set_registered_model_tag, str)
    monkeypatch.setattr(MlflowClient, "set_registered_model_tag", by_name)
    with pytest.raises(Refusal, match=f"denies writing {place}"):
        check_writable(registry_uri, "draftsmith", "draft-x", datasets=True)
    if denied == "draftsmith-datasets":
        check_writable(registry_uri, "draftsmith", "draft-x", datasets=False)
