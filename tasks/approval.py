"""What a person is asked before a draft is promoted: the form, and the comparison it shows."""

import re
from typing import Literal

from prefect.artifacts import create_markdown_artifact
from prefect.input import RunInput
from pydantic import Field

from infra.records.acceptance import RegisteredDraft
from infra.refusal import Refusal
from infra.tracking import registry
from tasks.data_plane import side_effect


class Approval(RunInput):
    """The form behind "Resume" in Prefect's UI."""

    version: int = Field(description="The version that this decides on.")
    decision: Literal["approve", "reject"] = Field(description="Whether it becomes the champion.")
    name: str = Field(default="", description="Who decides; kept with the decision.")
    reason: str = Field(default="", description="Why; kept with the decision.")

    @property
    def by(self) -> str:
        return self.name.strip() or "a person in Prefect's UI"


@side_effect("find candidate")
def find_candidate(uri: str, draft: str, version: int | None) -> RegisteredDraft:
    """The version asked for, or the challenger. Raises Refusal where there is none, or where it serves already."""
    if version is not None:
        return registry.find_version(uri, draft, version)
    challengers = [one for one in registry.list_drafts(uri, draft) if registry.CHALLENGER in one.aliases]
    if not challengers:
        raise Refusal(f"{draft} has no challenger: give the version, `draftsmith drafts list` shows what there is")
    return challengers[0]


@side_effect("show comparison")
def show_comparison(uri: str, candidate: RegisteredDraft) -> str:
    """All that speaks for the candidate as an artifact of the flow run; what the form shows of it is returned."""
    asked = question(candidate, registry.champion(uri, candidate.name))
    key = "comparison-" + re.sub(r"[^a-z0-9]+", "-", candidate.name.lower()).strip("-")
    create_markdown_artifact(
        f"{asked}\n\n## Version {candidate.version}\n\n{registry.describe(uri, candidate)}",
        key=key,
        description=f"Version {candidate.version} of {candidate.name}",
    )
    return f"{asked}\n\nConditions and further figures: this run's artifact `{key}`."


def question(candidate: RegisteredDraft, champion: RegisteredDraft | None) -> str:
    """Candidate and champion side by side, in Markdown."""
    rows = [("", "acceptance length", "gate"), _row(candidate, "candidate")]
    if champion is not None:
        rows.append(_row(champion, "champion"))
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    table = "\n".join([head, "| :--- | ---: | :--- |", *body])
    serves = f"version {champion.version} serves" if champion else "no draft serves"
    against = candidate.tags.get(registry.MEASURED_AGAINST, "")
    measured = f"compared with version {against} in the same job" if against else "compared with no draft"
    return (
        f"### Shall version {candidate.version} of {candidate.name} serve?\n\nNow {serves}. The candidate was "
        f"{measured}; the two lengths stand for the same only where both were measured on the same prompts.\n\n{table}"
    )


def _row(draft: RegisteredDraft, role: str) -> tuple[str, str, str]:
    length = "not measured" if draft.acceptance_length is None else f"{draft.acceptance_length:.3f}"
    return f"version {draft.version}, {role}", length, draft.tags.get("gate", "")
