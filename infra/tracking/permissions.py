"""Whether this user may write what a run writes, asked before anything is computed."""

from mlflow.exceptions import MlflowException

from infra.refusal import Refusal
from infra.tracking.client import check_admits, connect, experiment_id, get_model
from infra.tracking.datasets import datasets_of
from infra.tracking.registry import DRAFT, MARK


def check_writable(uri: str, experiment: str, model: str, *, datasets: bool) -> None:
    """Raise Refusal where MLflow does not let this user in, or denies writing an experiment (and with `datasets` that
    of its data sets) or a model.

    Missing experiments are created, and what is written is Draftsmith's mark. A missing registered model is left to be
    created by the registration.
    """
    check_admits(uri)
    client, setting = connect(uri), "tracking.experiment"
    names = [experiment, *([datasets_of(experiment)] if datasets else [])]
    place = ""
    try:
        for name in names:
            place = f"the experiment {name}"
            client.set_experiment_tag(experiment_id(client, name), MARK, "runs")
        place, setting = f"the registered model {model}", "tracking.registered_model"
        if get_model(client, model):
            client.set_registered_model_tag(model, MARK, DRAFT)
    except MlflowException as error:
        if error.error_code != "PERMISSION_DENIED":
            raise
        raise Refusal(
            f"MLflow at {uri} denies writing {place}: ask its owner for the permission to edit, or set {setting} to "
            "another name"
        ) from error
