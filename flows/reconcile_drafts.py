"""The reconcile flow: completes promotions that were interrupted, or made by moving an alias in MLflow's page.

It also keeps the overview of all drafts, an artifact, up to date.
"""

from prefect import flow, get_run_logger

from infra.processes.process import ProcessFailedError
from infra.refusal import Refusal
from infra.settings import tracking_uri as default_uri
from infra.tracking.client import REGISTRY_ERRORS
from tasks.events import FAILED, once_a_day, tell, tell_failure_once_a_day
from tasks.overview import show_drafts
from tasks.pools import lease
from tasks.promotion import complete_change, drafts_of_server, find_candidate, one_at_a_time, reconcile
from tasks.run import open_run
from tasks.version_run import prepare_target_of, recipe_of

TURN_S = 5.0
"""How long to wait for a promotion in progress. One that takes longer needs no completion."""
FAULTS = (*REGISTRY_ERRORS, ProcessFailedError, ValueError)
"""What keeps one draft from being completed, and is to keep no other."""


@flow(name="reconcile", on_failure=[tell_failure_once_a_day])
def reconcile_drafts(draft: str | None = None, tracking_uri: str | None = None) -> list[str]:
    """Compare the champion of each draft with its history, and complete what is unfinished, smoke test included.

    Args:
        draft: registered model; where empty, those that have a deployment or a flow run on this Prefect server.
        tracking_uri: MLflow; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db.

    Returns what was tested, one sentence each. Raises Refusal, once all were tried, with those that failed.
    """
    uri = tracking_uri or default_uri()
    said, failed = list[str](), list[str]()
    for name in [draft] if draft else drafts_of_server(uri):
        try:
            told = _reconcile(uri, name)
        except FAULTS as error:
            failed.append(f"{name} could not be completed: {error}")
            get_run_logger().exception(failed[-1])
            tell(FAILED, name, reason=failed[-1], event_id=once_a_day(name, "reconcile"))
            continue
        said += [told] if told else []
    show_drafts(uri)
    if failed:
        raise Refusal("; ".join(failed))
    return said


def _reconcile(uri: str, name: str) -> str | None:
    try:
        with one_at_a_time(name, TURN_S):
            waiting = reconcile(uri, name)
    except TimeoutError:
        return None
    if waiting is None:
        return None
    version = find_candidate(uri, name, waiting.version)
    # One folder for each change, however often its test is tried.
    with open_run(recipe_of(uri, version, "reconcile"), f"reconcile-{waiting.id[:8]}", create=True) as opened:
        prepare_target_of(opened, version)
        # Devices first, as promotions take them: the other order could wait for itself.
        with lease(opened, "inference") as (inference,), one_at_a_time(name):
            complete_change(opened, inference, version)
    now = find_candidate(uri, name, waiting.version)
    serves = "serves" if "champion" in now.aliases else "does not serve"
    return f"version {waiting.version} of {name} {serves}: {now.tags.get('smoke_test', 'not tested')}"
