"""The history of a draft: who promoted, refused or rolled back which version, when and why.

Every decision is a tag of the version that it is about, so it lives as long as the registry.
"""

from typing import Literal

from mlflow import MlflowClient

from infra.records.data_path import Record
from infra.tracking.client import connect
from infra.tracking.versions import find_model, model_versions

PREFIX = "decision."
LONGEST = 2500
"""Characters of a reason that are kept. MLflow takes 5,000 in a tag, and JSON may escape each character."""

Outcome = Literal["promoted", "refused", "rolled back", "superseded"]


class PromotionDecision(Record):
    """One decision about one version."""

    at: float
    """Seconds since 1970."""
    version: int
    outcome: Outcome
    """`superseded`: a newer decision overtook this promotion before its version had become champion."""
    champion_before: int | None
    champion_after: int | None = None
    by: str
    """`gate`, `smoke test`, `served traffic`, `outside Draftsmith`, or a person."""
    reason: str
    run: str = ""
    """Name of the run that decided; empty for a decision by command."""


def write_decision(client: MlflowClient, name: str, decision: PromotionDecision, key: str) -> None:
    """Add a decision to the history. Writing it again under the same key changes nothing."""
    shortened = decision.model_copy(update={"reason": decision.reason[:LONGEST]})
    client.set_model_version_tag(name, str(decision.version), PREFIX + key, shortened.model_dump_json())


def decisions(client: MlflowClient, name: str) -> list[PromotionDecision]:
    """All decisions about the versions of a registered model, oldest first."""
    tags = [item for version in model_versions(client, name) for item in version.tags.items()]
    found = [PromotionDecision.model_validate_json(text) for tag, text in tags if tag.startswith(PREFIX)]
    return sorted(found, key=lambda decision: decision.at)


def history(uri: str, name: str) -> list[PromotionDecision]:
    """All decisions about a draft's versions, oldest first. Raises Refusal for a draft that is not registered."""
    client = connect(uri)
    find_model(client, name)
    return decisions(client, name)
