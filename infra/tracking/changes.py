"""Changes of the champion: the record of one in progress, and the announcement of one that took effect."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from mlflow import MlflowClient
from pydantic import ValidationError

from infra.records.acceptance import RegisteredDraft, SmokeResult
from infra.records.data_path import Record
from infra.refusal import Refusal
from infra.tracking.client import find_model
from infra.tracking.registry import CHALLENGER, CHAMPION

CHANGE = "draftsmith.change"
"""Tag of the registered model: the change under way."""
EXPECTED = "draftsmith.champion"
"""Tag of the registered model: the version that the last change made champion, empty if it left none."""

Kind = Literal["promotion", "withdrawal"]


class Change(Record):
    """A promotion or a withdrawal under way."""

    id: str
    """UUID; a promotion keeps it when it becomes a withdrawal."""
    at: float = 0.0
    kind: Kind
    stage: Literal["intended", "moved", "settled"] = "intended"
    version: int
    before: int | None = None
    """The champion when this was recorded."""
    after: int | None = None
    """The champion once the alias has moved."""
    by: str
    reason: str
    run: str = ""
    """Name of the run that decided; empty for a decision by command."""
    tested: bool = False
    """Whether a smoke test has to confirm the promotion."""

    def repeats(self, other: "Change") -> bool:
        """Whether this asks again for what `other` does, as whoever resumes after an interruption does.

        A run that promotes a version may find its promotion turned into a withdrawal by the smoke test.
        """
        if self.run:
            return (self.run, self.version) == (other.run, other.version)
        mine, theirs = ((one.kind, one.version, one.by, one.reason, one.run) for one in (self, other))
        return mine == theirs


class Announcement(Record):
    """The announcement of a change that took effect, for the serving side. Repeated after a crash, with the same id."""

    id: str
    """UUID."""
    kind: Kind
    draft: str
    version: int
    previous_version: int | None
    """The champion before."""
    now: int | None
    """The champion now."""
    run: str
    by: str
    reason: str
    source: str
    """Address of the files of `version`."""
    now_source: str | None
    """Address of the files of `now`."""


SmokeTest = Callable[[RegisteredDraft], SmokeResult]
Announce = Callable[[Announcement], None]


def silent(_announcement: Announcement) -> None:
    """Announce nothing."""


@dataclass(frozen=True)
class State:
    """A draft as the registry has it: aliases, and the change under way."""

    champion: int | None
    challenger: int | None
    change: Change | None
    expected: int | None
    """The champion after the last change; another one was made champion outside Draftsmith."""
    is_noted: bool = True
    """Whether `expected` is known. Earlier versions left it to the history, and a person may have edited it."""

    @classmethod
    def read(cls, client: MlflowClient, name: str) -> Self:
        """One request, so that aliases and change belong together.

        Raises Refusal for an unknown draft, and for a change that was edited.
        """
        model = find_model(client, name)
        aliases = {alias: int(version) for alias, version in model.aliases.items()}
        expected = model.tags.get(EXPECTED)
        is_noted = expected is not None and (expected.isdecimal() or not expected)
        return cls(
            aliases.get(CHAMPION), aliases.get(CHALLENGER), _change(name, model.tags.get(CHANGE)),
            int(expected) if expected and is_noted else None, is_noted=is_noted,
        )  # fmt: skip

    def is_due(self, change: Change) -> bool:
        """Whether `change` has moved the alias, and its record was replaced by a rival's, decided on the same champion
        at the same moment, or is gone because the rival has given way."""
        rival = self.change is None or self.change.before == change.before
        return rival and change.stage != "intended" and change.before != change.after == self.champion


def _change(name: str, text: str | None) -> Change | None:
    try:
        return Change.model_validate_json(text) if text else None
    except ValidationError as error:
        raise Refusal(
            f"{name}: the tag {CHANGE} of the registered model holds no change that can be read (it was edited, or is "
            "of another version): delete it in MLflow's page; what it began is then noticed by the alias, or has to be "
            "decided again"
        ) from error
