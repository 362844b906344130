"""What is told about drafts, as Prefect's events: all have one form, whatever happened."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

from httpx import HTTPError
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import emit_event
from prefect.flows import Flow
from prefect.runtime import flow_run as this_run
from prefect.utilities.urls import url_for

from infra.network.health import public
from infra.redaction import redacted
from infra.settings import prefect_api_url, prefect_is_private, tracking_uri
from models.config.recipe import RunConfig

PROMOTED, WITHDRAWN = "draftsmith.draft.promoted", "draftsmith.draft.withdrawn"
"""The serving side loads another version."""
DRIFTED, DEGRADED = "draftsmith.draft.drifted", "draftsmith.draft.degraded"
"""Start a retraining; a rollback, because a version serves worse than the one that it replaced."""
UNPROVEN = "draftsmith.draft.unproven"
"""A draft is ahead of all rivals, too little to be promoted, and the next run goes on from it."""
WAITING, FAILED, GIVEN_UP = (f"draftsmith.draft.{what}" for what in ("waiting-for-approval", "failed", "given-up"))
"""Need a person."""
UNKNOWN = "draftsmith.server.unknown_draft"
"""A server runs a draft that is not registered."""
EVERY = "draftsmith.draft.*"
REPEATED = timedelta(minutes=20)
"""Until then an event is sent again, in case that no trigger got it. Prefect's triggers know its id for 30 minutes."""


def tell(event: str, draft: str, *, event_id: UUID | None = None, **said: Any) -> None:
    """Emit an event, one of the names above, whose resource is the registered model.

    `said`: see `payload`. Given the same `event_id` again, the event counts once, for as long as Prefect keeps events
    (7 days).
    """
    if event_id is not None and _was_told(event_id):
        return
    resource = {"prefect.resource.id": draft or "unknown", "prefect.resource.name": draft or "unknown"}
    emit_event(event, resource, payload=payload(draft, **said), id=event_id)


def _was_told(event_id: UUID) -> bool:
    """Whether Prefect has had this event for longer than `REPEATED`; False where it does not say."""
    if prefect_api_url() is None:
        return False
    until = (datetime.now(UTC) - REPEATED).isoformat()
    asked = {"filter": {"id": {"id": [str(event_id)]}, "occurred": {"until": until}}, "limit": 1}
    try:
        with get_client(sync_client=True) as client:
            return bool(client.request("POST", "/events/filter", json=asked).json()["events"])
    except (HTTPError, ValueError, KeyError):  # away, or a gateway answers for it; twice is better than never
        return False


def payload(
    draft: str,
    *,
    version: int | None = None,
    previous_version: int | None = None,
    reason: str = "",
    run: str = "",
    **more: Any,
) -> dict[str, Any]:
    """What an event says.

    Args:
        draft: the registered model; empty where it is not known.
        version: that it is about.
        previous_version: the champion before.
        reason: for people.
        run: name of the run folder.
        more: what only this kind of event says.
    """
    return {
        "draft": draft,
        "version": version,
        "model_uri": "" if version is None else f"models:/{draft}/{version}",
        "previous_version": previous_version,
        "reason": redacted(reason),
        "run": run,
        "links": _links(draft, version),
        **more,
    }


def _links(draft: str, version: int | None) -> dict[str, str]:
    """Pages that say more."""
    found, uri = dict[str, str](), tracking_uri()
    own = this_run.id
    if own and not prefect_is_private() and (page := url_for("flow-run", obj_id=own)):
        found["flow run"] = page
    if version is not None and uri.startswith(("http://", "https://")):
        found["version"] = f"{public(uri).rstrip('/')}/#/models/{draft}/versions/{version}"
    return found


def draft_of(parameters: dict[str, Any]) -> str:
    """The registered model that a flow's parameters are about; empty if they name none."""
    config = parameters.get("config")
    if isinstance(config, RunConfig):
        return config.draft_name
    if isinstance(config, dict):
        watched, registered = config.get("draft"), (config.get("tracking") or {}).get("registered_model")
        return watched if isinstance(watched, str) else str(registered or f"draft-{config.get('name')}")
    return str(parameters.get("draft") or "")


def tell_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of flows: a run about a draft has failed."""
    tell(FAILED, draft_of(flow_run.parameters), reason=state.message or "", flow=flow.name, flow_run=flow_run.name)


def tell_failure_once_a_day(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of flows that a schedule starts every few minutes: a run about a draft has failed, which is told once a
    day."""
    draft = draft_of(flow_run.parameters)
    said = {"reason": state.message or "", "flow": flow.name, "flow_run": flow_run.name}
    tell(FAILED, draft, event_id=once_a_day(draft, flow.name), **said)


def once_a_day(draft: str, what: str) -> UUID:
    """Id of an event that counts once a day."""
    return uuid5(NAMESPACE_URL, f"draftsmith {draft} {what} {datetime.now(UTC):%Y-%m-%d}")
