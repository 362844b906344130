"""The promote flow: a person approves a draft, and it goes into service. There is no timeout."""

from prefect import flow, suspend_flow_run

from infra.settings import tracking_uri as default_uri
from tasks.events import tell_failure
from tasks.pools import lease
from tasks.promotion import Approval, find_candidate, one_at_a_time, put_into_service, refuse_draft, show_comparison
from tasks.run import open_run
from tasks.version_run import prepare_target_of, recipe_of


@flow(name="promote", persist_result=True, on_failure=[tell_failure])
def promote(
    draft: str,
    version: int | None = None,
    ask: bool = True,
    reason: str = "",
    tracking_uri: str | None = None,
    run: str | None = None,
) -> str:
    """Put a version into service once a person has approved it and it passed the smoke test.

    Args:
        draft: registered model, for instance draft-quickstart.
        version: of the draft; the challenger where empty.
        ask: show the comparison and wait for "Resume"; without it whoever starts this has decided.
        reason: kept with the decision where nobody is asked.
        tracking_uri: MLflow; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db.
        run: name of a run to resume, which does not ask again; if empty, a new run.

    Returns what came of it, in words.
    """
    uri = tracking_uri or default_uri()
    answer = Approval.of_run(run)
    candidate = find_candidate(uri, draft, answer.version if answer else version)
    by = "whoever started the flow"
    question = show_comparison(uri, candidate)
    if ask and answer is None:
        # Resumed, the flow starts from its top; the answer names the version, whatever the challenger is by then.
        # Nothing is chosen beforehand: a click on Resume alone decides nothing.
        answer = suspend_flow_run(
            wait_for_input=Approval.with_initial_data(description=question, version=candidate.version)
        )
        candidate = find_candidate(uri, draft, answer.version)
    if answer:
        by, reason = answer.by, answer.reason
        if answer.decision == "reject":
            refuse_draft(uri, candidate, by, reason)
            return f"version {candidate.version} of {draft} is not promoted"
    with open_run(recipe_of(uri, candidate, "promote"), run) as opened:
        if answer:
            answer.keep(opened.folder)
        prepare_target_of(opened, candidate)
        with lease(opened, "inference") as (inference,), one_at_a_time(draft):
            candidate = put_into_service(opened, inference, candidate, by, reason)
    serves = "serves" if "champion" in candidate.aliases else "does not serve: `draftsmith drafts history` says why"
    return f"version {candidate.version} of {draft} {serves}"
