"""Queries of MLflow's model registry that follow its pages to the end."""

from collections.abc import Iterator

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException

from infra.refusal import Refusal

PAGE = 100


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


def registered_models(client: MlflowClient) -> Iterator[RegisteredModel]:
    """All registered models."""
    token = None
    while True:
        page = client.search_registered_models(max_results=PAGE, page_token=token)
        yield from page
        if not (token := page.token):
            return


def model_versions(client: MlflowClient, name: str) -> Iterator[ModelVersion]:
    """All versions of a registered model, newest first."""
    quote = '"' if "'" in name else "'"
    token = None
    while True:
        page = client.search_model_versions(
            f"name = {quote}{name}{quote}", max_results=PAGE, order_by=["version_number DESC"], page_token=token
        )
        yield from page
        if not (token := page.token):
            return
