"""The rollback flow: the champion leaves service. Started by a person, or by the event that it serves badly."""

from prefect import flow

from infra.settings import tracking_uri as default_uri
from tasks.promotion import withdraw
from tasks.version_run import find_champion


@flow(name="rollback")
def rollback(
    draft: str, reason: str, version: int | None = None, by: str = "a person", tracking_uri: str | None = None
) -> str:
    """Put the version back that the champion replaced.

    Args:
        draft: registered model, for instance draft-quickstart.
        reason: kept with the decision.
        version: only where this one is the champion; whichever it is where empty.
        by: who decides; kept with the decision.
        tracking_uri: MLflow; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db.

    Returns what came of it, in words.
    """
    uri = tracking_uri or default_uri()
    champion = find_champion(uri, draft)
    if version not in (None, champion.version):
        return f"version {version} of {draft} is not the champion (any more): version {champion.version} stays"
    now = withdraw(uri, champion, by, reason)
    return f"version {champion.version} of {draft} is withdrawn, {f'version {now.version}' if now else 'none'} serves"
