"""Who decided what about a draft's versions, when and why: kept with the versions, as tags of the registry.

Written by whoever moves an alias; read by `draftsmith drafts history`.
"""

import time
from typing import Literal

from mlflow.exceptions import MlflowException

from infra.records import Record
from infra.refusal import Refusal
from infra.tracking.client import connect

PREFIX = "decision."
LONGEST = 5000
"""Characters that MLflow takes for a tag."""


class Decision(Record):
    """One decision about one version."""

    at: float
    """Seconds since 1970."""
    version: int
    outcome: Literal["promoted", "refused", "rolled back"]
    champion_before: int | None
    by: str
    """`gate`, `smoke test`, `served traffic`, or a person."""
    reason: str


def write_decision(
    uri: str,
    name: str,
    version: int,
    outcome: Literal["promoted", "refused", "rolled back"],
    *,
    champion_before: int | None,
    by: str,
    reason: str,
) -> Decision:
    """Keep a decision for good. A reason too long for a tag is cut."""
    decision = Decision(
        at=time.time(),
        version=version,
        outcome=outcome,
        champion_before=champion_before,
        by=by,
        reason=reason[: LONGEST // 2],
    )
    tag = f"{PREFIX}{int(decision.at * 1000)}"
    connect(uri).set_model_version_tag(name, str(version), tag, decision.model_dump_json())
    return decision


def history(uri: str, name: str) -> list[Decision]:
    """All decisions about a draft's versions, oldest first. Raises Refusal for a draft that is not registered."""
    client = connect(uri)
    try:
        client.get_registered_model(name)
    except MlflowException as error:
        raise Refusal(f"no draft {name} is registered: `draftsmith drafts list` shows what there is") from error
    versions = client.search_model_versions(f"name = '{name}'")
    texts = [text for version in versions for tag, text in version.tags.items() if tag.startswith(PREFIX)]
    return sorted((Decision.model_validate_json(text) for text in texts), key=lambda decision: decision.at)
