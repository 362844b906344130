"""Puts a draft into service and takes it out: smoke test on a leased pool, events for the serving side.

What is done in which order, and what an interruption leaves to do, is decided by `infra.tracking.promotion`.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.input import RunInput
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Completed
from pydantic import Field

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.markdown import markdown_table
from infra.pools.base import Pool
from infra.records.acceptance import GateDecision, RegisteredDraft, SmokeResult
from infra.refusal import Refusal
from infra.settings import prefect_is_private
from infra.tracking import registry
from infra.tracking.changes import Announcement, Change
from infra.tracking.promotion import DraftInService, Step
from tasks.events import PROMOTED, UNPROVEN, WAITING, WITHDRAWN, tell
from tasks.pools import occupy, run_main, span_of
from tasks.report.meaning import what_next
from tasks.run import OpenRun, folder_of_flow_run, run_named
from tasks.side_effects import artifact_key, draft_tag, side_effect

EVENTS = {"promotion": PROMOTED, "withdrawal": WITHDRAWN}
"""The event by kind of change; it tells the serving side which version to load."""
APPROVAL = "promote/promote"
"""The deployment that asks a person."""
DONE: dict[Step, str] = {
    "promote": "promoted", "refuse": "not promoted", "ask": "not promoted yet", "leave": "left as it is"
}  # fmt: skip
NOT_PROMOTED = "Not promoted"
"""State of completed runs whose draft does not serve."""
TIMEOUT_S = 3600.0


def promote_or_refuse(run: OpenRun, pool: Pool, draft: RegisteredDraft, gate: GateDecision) -> RegisteredDraft:
    """Do as the gate says, once: a resumed run does not undo what was decided since.

    Where the recipe wants a person's approval, the draft stays challenger and the deployment `promote` asks for it.
    """
    with one_at_a_time(draft.name):
        step, reason = follow_decision(run, pool, draft, gate)
    if gate.unproven and run.config.training.start_from == "furthest":
        tell_unproven(run.folder.name, draft, gate)
    if step == "ask":
        ask_for_approval(draft, run.config.tracking.uri, run.config.name)
    get_run_logger().info("version %s of %s: %s, %s", draft.version, draft.name, DONE[step], reason)
    return registry.find_version(run.tracking_uri, draft.name, draft.version)


def tell_unproven(run: str, draft: RegisteredDraft, gate: GateDecision) -> None:
    """Say that the next run goes on from this version. A resumed run says it again, which counts once."""
    told = uuid5(NAMESPACE_URL, f"draftsmith {run} {UNPROVEN}")
    tell(UNPROVEN, draft.name, event_id=told, version=draft.version, reason=gate.reason, run=run)


def ended(folder: str, draft: RegisteredDraft, gate: GateDecision) -> str:
    """What a flow returns whose run ended with this draft: the folder, which Prefect hands to the flow's caller.

    Among Prefect's runs, one whose draft does not serve is told from the others by the name of its state.
    """
    if registry.CHAMPION in draft.aliases:
        return folder
    return cast("str", Completed(name=NOT_PROMOTED, message=what_next(gate, draft), data=folder))


def one_at_a_time(draft: str, wait_s: float = TIMEOUT_S) -> AbstractContextManager[None]:
    """A turn at changing which version of a draft serves. A private Prefect server has one flow, which needs none."""
    return nullcontext() if prefect_is_private() else occupy(f"promotion-of-{draft}", 1, 1, wait_s)


@side_effect("follow gate")
def follow_decision(run: OpenRun, pool: Pool, draft: RegisteredDraft, gate: GateDecision) -> tuple[Step, str]:
    """Promote, refuse, or leave it to a person."""
    return _in_service(run, pool, draft).follow_gate(draft, gate, approval=run.config.promotion.approval)


@side_effect("put into service")
def put_into_service(run: OpenRun, pool: Pool, draft: RegisteredDraft, by: str, reason: str) -> RegisteredDraft:
    """Promote it if it passes the smoke test; otherwise the previous champion returns."""
    return _in_service(run, pool, draft).promote(draft.version, by=by, reason=reason, run=run.folder.name)


@side_effect("refuse draft")
def refuse_draft(uri: str, draft: RegisteredDraft, by: str, reason: str) -> RegisteredDraft:
    """Keep the reason with the version; no alias moves."""
    refused = DraftInService(uri, draft.name).refuse(draft.version, by=by, reason=reason)
    get_run_logger().info("version %s of %s is not promoted: %s", draft.version, draft.name, reason)
    return refused


@side_effect("list drafts")
def drafts_of_server(uri: str) -> list[str]:
    """Names of the registered drafts that have a deployment or a flow run on this Prefect server.

    Others in the same MLflow belong to installations whose targets and engines may be missing here.
    """
    with get_client(sync_client=True) as client:
        return [name for name in sorted({one.name for one in registry.list_drafts(uri)}) if is_known(client, name)]


def is_known(client: SyncPrefectClient, draft: str) -> bool:
    """Whether a deployment or a flow run of the Prefect server is about this draft."""
    tagged = {"tags": {"all_": [draft_tag(draft)]}}
    return bool(
        client.read_deployments(deployment_filter=DeploymentFilter.model_validate(tagged), limit=1)
        or client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(tagged), limit=1)
    )


@side_effect("reconcile")
def reconcile(uri: str, draft: str) -> Change | None:
    """Complete an interrupted change, or one made in MLflow's page; returns it if it needs a smoke test."""
    return DraftInService(uri, draft, announce=announce).reconcile()


@side_effect("complete change")
def complete_change(run: OpenRun, pool: Pool, draft: RegisteredDraft) -> None:
    """Run the smoke test that an interrupted change still needs."""
    _in_service(run, pool, draft).resume()


def _in_service(run: OpenRun, pool: Pool, draft: RegisteredDraft) -> DraftInService:
    test = partial(smoke_test, run, pool)
    return DraftInService(run.tracking_uri, draft.name, smoke_test=test, announce=announce)


@side_effect("smoke test", retries=1)
def smoke_test(run: OpenRun, pool: Pool, draft: RegisteredDraft) -> SmokeResult:
    """Download the champion as serving does, and decode a few prompts of its benchmark again."""
    with TemporaryDirectory(dir=run.folder.path, prefix="registry-") as downloaded:
        export, counts = Path(downloaded) / "export", Path(downloaded) / "request_counts.json"
        registry.download(run.tracking_uri, draft, export)
        write_atomically(counts, registry.read_artifact(run.tracking_uri, draft, registry.REQUEST_COUNTS))
        run_main(
            run,
            pool,
            "smoke-test",
            "models.benchmark.smoke",
            str(export),
            str(counts),
            timeout_s=TIMEOUT_S,
            span=span_of(run),
        )
    return SmokeResult.read(run.folder.smoke)


@side_effect("withdraw draft")
def withdraw(uri: str, draft: RegisteredDraft, by: str, reason: str) -> RegisteredDraft | None:
    """Take it out of service; returns the version that serves now, if any."""
    return DraftInService(uri, draft.name, announce=announce).withdraw(draft.version, by=by, reason=reason)


def announce(change: Announcement) -> None:
    """Emit the event of a change."""
    tell(EVENTS[change.kind], event_id=UUID(change.id), **change.model_dump(mode="json", exclude={"id", "kind"}))


@side_effect("ask for approval")
def ask_for_approval(draft: RegisteredDraft, tracking_uri: str | None, recipe: str) -> str | None:
    """Submit the deployment that asks a person, once per version; the flow run's id, None where there is none.

    It is the draft's own (`draftsmith deploy`), or the shared one.

    `tracking_uri` is the recipe's: the environment's may hold a password, and parameters are shown.
    """
    by_hand = f"draftsmith drafts promote {draft.version} --name {draft.name}"
    with get_client(sync_client=True) as client:
        deployment = _deployed(client, f"promote/{recipe}") or _deployed(client, APPROVAL)
    if deployment is None:
        get_run_logger().warning("version %s waits for your approval: %s", draft.version, by_hand)
        return None
    submitted = run_deployment(
        deployment,
        parameters={"draft": draft.name, "version": draft.version, "tracking_uri": tracking_uri},
        timeout=0,
        as_subflow=False,
        tags=[draft_tag(draft.name)],
        idempotency_key=f"approve-{draft.model_id}",
    )
    assert isinstance(submitted, FlowRun)
    get_run_logger().info("version %s waits for approval: flow run %s, or %s", draft.version, submitted.name, by_hand)
    asked = f"resume the flow run {submitted.name}, or: {by_hand}"
    tell(WAITING, draft.name, version=draft.version, reason=asked, event_id=submitted.id)
    return str(submitted.id)


def _deployed(client: SyncPrefectClient, name: str) -> UUID | None:
    try:
        return client.read_deployment_by_name(name).id
    except ObjectNotFound:
        return None


ANSWER = "approval.json"
"""File in a promotion's run folder: what the person said."""


class Approval(RunInput):
    """The form behind "Resume" in Prefect's UI."""

    version: int = Field(description="The version that this decides on.")
    decision: Literal["approve", "reject"] = Field(description="Whether it becomes the champion.")
    name: str = Field(default="", description="Who decides; kept with the decision.")
    reason: str = Field(default="", description="Why; kept with the decision.")

    @property
    def by(self) -> str:
        return self.name.strip() or "a person in Prefect's UI"

    @classmethod
    def of_run(cls, run: str | None) -> "Approval | None":
        """The answer that a promotion's run has; None: it is still to be asked for."""
        flow_run = this_flow_run.get_id()  # "Retry" in Prefect's page names no run
        folder = run_named(run) if run else flow_run and folder_of_flow_run(flow_run, None)
        file = folder.path / ANSWER if folder else None
        return cls.model_validate_json(file.read_bytes()) if file and file.is_file() else None

    def keep(self, folder: RunFolder) -> None:
        """Keep it with the run: a flow that dies while it waits for a GPU does not ask again when it is resumed."""
        write_atomically(folder.path / ANSWER, self)


@side_effect("find candidate")
def find_candidate(uri: str, draft: str, version: int | None) -> RegisteredDraft:
    """The requested version, or the challenger. Raises Refusal if there is none or it is champion already."""
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
    key = artifact_key("comparison", candidate.name)
    create_markdown_artifact(
        f"{asked}\n\n## Version {candidate.version}\n\n{registry.describe(uri, candidate)}",
        key=key,
        description=f"Version {candidate.version} of {candidate.name}",
    )
    return f"{asked}\n\nConditions and further figures: this run's artifact `{key}`."


def question(candidate: RegisteredDraft, champion: RegisteredDraft | None) -> str:
    """Candidate and champion side by side, in Markdown."""
    drafts = {"candidate": candidate} | ({"champion": champion} if champion else {})
    table = markdown_table(
        [
            {
                "": f"version {draft.version}, {role}",
                "acceptance length": f"{draft.acceptance_length:.3f}"
                if draft.acceptance_length
                else draft.tags.get(registry.ACCEPTANCE, "not measured"),
                "gate": draft.tags.get(registry.GATE, ""),
            }
            for role, draft in drafts.items()
        ]
    )
    serves = f"version {champion.version} serves" if champion else "no draft serves"
    against = candidate.tags.get(registry.MEASURED_AGAINST, "")
    measured = f"compared with version {against} in the same job" if against else "compared with no draft"
    return (
        f"### Shall version {candidate.version} of {candidate.name} serve?\n\nNow {serves}. The candidate was "
        f"{measured}; the two lengths stand for the same only where both were measured on the same prompts.\n\n{table}"
    )
