"""Finds out how a flow run died, and starts its run again."""

import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.states import Cancelled, Crashed

from infra.recovery import ATTEMPTS, is_owned, newest_step, note_recovery
from infra.refusal import Refusal
from infra.run_folder import RunFolder
from models.config import read_config
from tasks.data_plane import worth_retrying
from tasks.run import folder_of_flow_run


@dataclass(frozen=True)
class DeadRun:
    """A flow run that did not end by itself, and what it was asked for."""

    flow_run: UUID
    name: str
    deployment: UUID | None
    parameters: dict[str, Any]
    tags: tuple[str, ...]

    @property
    def folder(self) -> RunFolder | None:
        """Of its run, if it came so far as to make it."""
        return folder_of_flow_run(str(self.flow_run), self.parameters.get("run"))

    def step(self) -> int:
        """Of the newest checkpoint; 0 for a run that trains nothing."""
        folder = self.folder
        return newest_step(folder, read_config(folder.config).ledger.url) if folder else 0


ENDING_S = 15.0
"""A flow lets go of its run a moment before the server hears how it ended."""
GIVEN_UP = "draftsmith.run.given-up"
"""The event that a person should hear of."""


@task(name="look at the dead run", retries=2, retry_delay_seconds=5, cache_policy=NO_CACHE)
def look_at(flow_run: str) -> DeadRun | None:
    """The flow run, if it is really dead and to be gone on with.

    One whose heartbeats ended is set to Crashed, or to Cancelled where a person had said so.
    """
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(UUID(flow_run))
        dead = DeadRun(found.id, found.name, found.deployment_id, found.parameters, tuple(found.tags))
        if dead.folder and is_owned(dead.folder):
            get_run_logger().warning("%s lives: a process still runs %s", dead.name, dead.folder.name)
            return None
        if found.state_type != StateType.CRASHED:
            time.sleep(ENDING_S)
        found = client.read_flow_run(found.id)
        state = found.state_type
        if state not in (StateType.CRASHED, StateType.RUNNING, StateType.PENDING, StateType.CANCELLING):
            get_run_logger().info("%s has ended as %s: nothing to do", found.name, found.state_name)
            return None
        if state == StateType.CANCELLING:
            client.set_flow_run_state(found.id, Cancelled(message="cancelled; its worker had died"), force=True)
            return None
        if state != StateType.CRASHED:
            message = "no heartbeat, and no process: worker and flow died"
            client.set_flow_run_state(found.id, Crashed(message=message), force=True)
    return dead


@task(
    name="start it again",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=worth_retrying,
    cache_policy=NO_CACHE,
)
def start_again(dead: DeadRun) -> str | None:
    """Submit the same deployment with the same run to go on with; the new flow run's id.

    None where it was started without a deployment. Raises Refusal, after an event for people, where the run died so
    often at the same checkpoint that a person has to look.
    """
    folder = dead.folder
    if dead.deployment is None:
        run = folder.name if folder else "it had made no run yet"
        get_run_logger().warning("%s was started by hand: go on by draftsmith retrain --resume (%s)", dead.name, run)
        return None
    if folder and not note_recovery(folder, str(dead.flow_run), dead.step()):
        emit_event(
            GIVEN_UP,
            {"prefect.resource.id": f"prefect.flow-run.{dead.flow_run}", "prefect.resource.name": dead.name},
            payload={"run": folder.name},
        )
        raise Refusal(
            f"run {folder.name} died {ATTEMPTS + 1} times without a new checkpoint: read {folder.logs}, mend what is "
            f"wrong, then start it again by draftsmith retrain --resume {folder.name}"
        )
    parameters = dead.parameters | ({"run": folder.name} if folder else {})
    submitted = run_deployment(
        dead.deployment,
        parameters=parameters,
        timeout=0,
        as_subflow=False,
        tags=[*dead.tags, "recovered"],
        idempotency_key=f"recover-{dead.flow_run}",
    )
    assert isinstance(submitted, FlowRun)
    get_run_logger().info("%s goes on as %s", folder.name if folder else dead.name, submitted.name)
    return str(submitted.id)
