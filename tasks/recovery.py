"""Finds out how a flow run died, and resumes its run."""

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from infra.files.run_folder import RunFolder
from infra.refusal import Refusal
from infra.run.ownership import is_owned
from infra.run.recovery import ATTEMPTS, newest_step, note_recovery
from models.config.recipe import read_config
from tasks.events import GIVEN_UP, draft_of, tell
from tasks.run import RunsPlace, folder_of_flow_run
from tasks.side_effects import side_effect


@dataclass(frozen=True)
class DeadRun:
    """A flow run that died, and its parameters."""

    flow_run: UUID
    name: str
    deployment: UUID
    parameters: dict[str, Any]
    tags: tuple[str, ...]

    @property
    def restarts(self) -> int:
        """How often its run was started again before, as the tags of its flow runs count."""
        return max((int(tag.removeprefix(RESTART)) for tag in self.tags if tag.startswith(RESTART)), default=0)

    @property
    def folder(self) -> RunFolder | None:
        """Folder of its run, if it was created."""
        return folder_of_flow_run(str(self.flow_run), self.parameters.get("run"))

    def step(self) -> int:
        """Step of the newest checkpoint; 0 for a run without training."""
        folder = self.folder
        return newest_step(folder, read_config(folder.config).ledger.url) if folder else 0


ENTRYPOINTS = frozenset(
    {
        "flows.retrain_draft.retrain",
        "flows.regenerate_text.regenerate",
        "flows.promote_draft.promote",
        "flows.benchmark_champion.benchmark_champion",
    }
)
"""Entry points of the deployments whose runs can be resumed. A deployment is ours by entry point and tag."""
TAG = "draftsmith"
RESTART = "restart-"
"""Begins the tag of a flow run that was started again; the number of the restart follows."""
ENDING_S = 15.0
"""A flow releases its run shortly before the server hears how it ended."""
SUBMISSION = timedelta(minutes=10)
"""A flow run that is longer in one state of its submission has lost its worker. A shorter one may be another attempt,
as `draftsmith up` makes. prefect.yaml waits longer, because clocks may differ."""
POLL_S = 1.0
UNFINISHED = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)


@side_effect("look at the dead run")
def look_at(flow_run: str) -> DeadRun | None:
    """The flow run, if it belongs to one of our deployments, is really dead, and is to be resumed.

    One whose heartbeats ended is set to Crashed, or to Cancelled where a person had cancelled it.

    Raises Refusal, and changes nothing, where the flow run keeps its run in a folder that is not seen here.
    """
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(UUID(flow_run))
        if why := _not_ours(client, found):
            get_run_logger().warning("%s is left alone: %s", found.name, why)
            return None
        assert found.deployment_id
        dead = DeadRun(found.id, found.name, found.deployment_id, found.parameters, tuple(found.tags))
        if dead.folder and is_owned(dead.folder):
            get_run_logger().warning("%s lives: a process still runs %s", dead.name, dead.folder.name)
            return None
        deadline = time.monotonic() + ENDING_S
        while found.state_type in UNFINISHED and time.monotonic() < deadline:
            time.sleep(POLL_S)
            found = client.read_flow_run(found.id)
        state = found.state_type
        if state != StateType.CRASHED and state not in UNFINISHED:
            get_run_logger().info("%s has ended as %s: nothing to do", found.name, found.state_name)
            return None
        if found.state and state == StateType.PENDING and datetime.now(UTC) - found.state.timestamp < SUBMISSION:
            get_run_logger().info("%s is being submitted: it is left alone", found.name)
            return None
        if dead.folder is None:
            _refuse_elsewhere(found)
        if state == StateType.CANCELLING:
            client.set_flow_run_state(found.id, Cancelled(message="cancelled; its worker had died"), force=True)
            return None
        if state != StateType.CRASHED:
            message = "no heartbeat, and no process: worker and flow died"
            client.set_flow_run_state(found.id, Crashed(message=message), force=True)
    return dead


def _refuse_elsewhere(flow_run: FlowRun) -> None:
    """Raise Refusal where the flow run keeps its run elsewhere: whether that lives can be seen only there."""
    there, here = RunsPlace.of(flow_run.labels), RunsPlace.here()
    if there and there != here:
        raise Refusal(
            f"{flow_run.name} keeps its run in {there}, and `recover` looks in {here}: nothing was changed. Give the "
            "workers of both work pools one runs folder under one path ($DRAFTSMITH_RUNS); if the run is dead, resume "
            f"it on {there.host} with `draftsmith retrain --resume RUN`"
        )


def _not_ours(client: SyncPrefectClient, flow_run: FlowRun) -> str | None:
    """Why nothing can be started for the flow run: others may have a flow of the same name on the same server."""
    deployment = None
    with suppress(ObjectNotFound):  # deleted between the two questions
        deployment = client.read_deployment(flow_run.deployment_id) if flow_run.deployment_id else None
    if deployment and TAG in deployment.tags and deployment.entrypoint in ENTRYPOINTS:
        return None
    if deployment or TAG not in flow_run.tags:
        return "it is not a run of Draftsmith's deployments"
    folder = folder_of_flow_run(str(flow_run.id), flow_run.parameters.get("run"))
    remedy = f"; resume its run with `draftsmith retrain --resume {folder.name}`" if folder else ""
    return f"its deployment was deleted, as by `undeploy` or with a recipe's old name{remedy}"


@side_effect("start it again")
def start_again(dead: DeadRun) -> str:
    """Submit the same deployment to resume the same run; the new flow run's id.

    Raises Refusal, after an event for people, where the run died so often without progress that a person has to look:
    ATTEMPTS restarts at the same checkpoint, or ATTEMPTS restarts before it had made a run folder.
    """
    folder = dead.folder
    may = note_recovery(folder, str(dead.flow_run), dead.step()) if folder else dead.restarts < ATTEMPTS
    if not may:
        why = _given_up(dead, folder)
        run = folder.name if folder else ""
        tell(GIVEN_UP, draft_of(dead.parameters), reason=why, run=run, flow_run_name=dead.name)
        raise Refusal(why)
    parameters = dead.parameters | ({"run": folder.name} if folder else {})
    submitted = run_deployment(
        dead.deployment,
        parameters=parameters,
        timeout=0,
        as_subflow=False,
        tags=[*(tag for tag in dead.tags if not tag.startswith(RESTART)), f"{RESTART}{dead.restarts + 1}"],
        idempotency_key=f"recover-{dead.flow_run}",
    )
    assert isinstance(submitted, FlowRun)
    get_run_logger().info("%s is resumed as %s", folder.name if folder else dead.name, submitted.name)
    return str(submitted.id)


def _given_up(dead: DeadRun, folder: RunFolder | None) -> str:
    if folder is None:
        return (
            f"{dead.name} died {ATTEMPTS + 1} times before it had made a run folder: read its worker's log, correct "
            "the cause, then start the deployment again"
        )
    return (
        f"run {folder.name} died {ATTEMPTS + 1} times without a new checkpoint: read {folder.logs}, correct the "
        f"cause, then resume it with `draftsmith retrain --resume {folder.name}`"
    )
