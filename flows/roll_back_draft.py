"""The rollback flow: withdraws the champion. Started by a person or by the event `draftsmith.draft.degraded`."""

from prefect import flow

from infra.settings import tracking_uri as default_uri
from tasks.events import tell_failure
from tasks.promotion import withdraw
from tasks.version_run import find_champion


@flow(name="rollback", on_failure=[tell_failure])
def rollback(
    draft: str, reason: str, version: int | None = None, by: str = "a person", tracking_uri: str | None = None
) -> str:
    """Take the champion out of service; the version that it replaced serves again, if there was one.

    Args:
        draft: registered model, for instance draft-quickstart.
        reason: recorded with the decision.
        version: withdraw nothing unless this version is the champion; empty: whichever is.
        by: who decides; recorded with the decision.
        tracking_uri: MLflow; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db.

    Returns the outcome as a sentence.
    """
    uri = tracking_uri or default_uri()
    champion = find_champion(uri, draft)
    if version not in (None, champion.version):
        return f"version {version} of {draft} is not the champion (any more): version {champion.version} stays"
    now = withdraw(uri, champion, by, reason)
    if now and now.version == champion.version:
        return f"version {now.version} of {draft} still serves: `draftsmith drafts history` says why"
    return f"version {champion.version} of {draft} is withdrawn, {f'version {now.version}' if now else 'none'} serves"
