"""What a person is asked before a draft is promoted: the form, and the comparison it shows."""

import re
from typing import Literal

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.input import RunInput
from pydantic import Field

from infra.results import RegisteredDraft
from infra.tracking import registry
from tasks.data_plane import worth_retrying

RETRIES = {"retries": 2, "retry_delay_seconds": 5, "retry_condition_fn": worth_retrying, "cache_policy": NO_CACHE}


class Approval(RunInput):
    """The form behind "Resume" in Prefect's UI."""

    version: int = Field(description="The version that this decides on.")
    decision: Literal["approve", "reject"] = Field(description="Whether it becomes the champion.")
    name: str = Field(default="", description="Who decides; kept with the decision.")
    reason: str = Field(default="", description="Why; kept with the decision.")

    @property
    def by(self) -> str:
        return self.name.strip() or "a person in Prefect's UI"


@task(name="find candidate", **RETRIES)
def find_candidate(uri: str, draft: str, version: int | None) -> RegisteredDraft:
    """The version asked for, or the challenger. Raises ValueError where there is none, or where it serves already."""
    if version is not None:
        return registry.find_version(uri, draft, version)
    challengers = [one for one in registry.list_drafts(uri, draft) if registry.CHALLENGER in one.aliases]
    if not challengers:
        raise ValueError(f"{draft} has no challenger: give the version, `draftsmith drafts list` shows what there is")
    return challengers[0]


@task(name="show comparison", **RETRIES)
def show_comparison(uri: str, candidate: RegisteredDraft) -> str:
    """Candidate and champion side by side, as Markdown: an artifact of the flow run, and what the form shows."""
    text = comparison(candidate, registry.champion(uri, candidate.name), registry.describe(uri, candidate))
    key = "comparison-" + re.sub(r"[^a-z0-9]+", "-", candidate.name.lower()).strip("-")
    create_markdown_artifact(text, key=key, description=f"Version {candidate.version} of {candidate.name}")
    return text


def comparison(candidate: RegisteredDraft, champion: RegisteredDraft | None, description: str) -> str:
    """What speaks for the candidate, in Markdown."""
    rows: list[tuple[str, ...]] = [("version", "acceptance length", "gate", "target revision", "trained on", "run")]
    for draft in (candidate, champion):
        if draft is not None:
            rows.append(_row(draft, "champion" if draft is champion else "candidate"))
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    table = "\n".join([head, "|" + " --- |" * len(rows[0]), *body])
    serves = f"version {champion.version} serves" if champion else "no draft serves"
    title = f"# {candidate.name}: shall version {candidate.version} serve? Now {serves}."
    return "\n\n".join([title, table, f"## Version {candidate.version}", description])


def _row(draft: RegisteredDraft, role: str) -> tuple[str, ...]:
    tags = draft.tags
    length = "not measured" if draft.acceptance_length is None else f"{draft.acceptance_length:.3f}"
    return (
        f"{draft.version} ({role})", length, tags.get("gate", ""), tags.get("target_revision", "")[:12],
        tags.get("dataset_hash", "")[:12], tags.get(registry.RUN, ""),
    )  # fmt: skip
