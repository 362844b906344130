"""Puts a draft into service: alias, smoke test, and back again if that fails. Runs in the flow's process."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound

from infra.files import write_atomically
from infra.pools.base import Pool
from infra.results import GateDecision, RegisteredDraft, SmokeResult
from infra.settings import prefect_is_private
from infra.tracking import registry
from infra.tracking.decisions import history
from tasks.data_plane import run_main, worth_retrying
from tasks.limits import occupy
from tasks.run import OpenRun

GATE = "gate"
SMOKE_TEST = "smoke test"
PROMOTED = "draftsmith.draft.promoted"
"""The event that tells the serving side which version to load."""
WITHDRAWN = "draftsmith.draft.withdrawn"
"""The event that a champion was taken out of service; its payload names the version that serves now, if any."""
APPROVAL = "promote/promote"
"""The deployment that asks a person."""
TIMEOUT_S = 3600.0
RETRIES = {"retries": 2, "retry_delay_seconds": 5, "retry_condition_fn": worth_retrying, "cache_policy": NO_CACHE}


class SmokeTestFailedError(Exception):
    """A promoted draft does not decode as it was benchmarked."""


def promote_or_refuse(run: OpenRun, pool: Pool, draft: RegisteredDraft, gate: GateDecision) -> RegisteredDraft:
    """Do as the gate says, once: a resumed run does not undo what was decided since.

    Where the recipe wants a person's approval, the draft stays challenger and the deployment `promote` asks for it.
    """
    uri = run.tracking_uri
    with one_at_a_time(draft.name):
        draft = registry.find_version(uri, draft.name, draft.version)
        step, reason = next_step(uri, draft, gate, approval=run.config.promotion.approval)
        if step == "promote":
            return put_into_service(run, pool, draft, GATE, reason)
    if step == "refuse":
        return refuse_draft(uri, draft, GATE, reason)
    if step == "ask":
        ask_for_approval(draft, run.config.tracking.uri)
    get_run_logger().info("version %s of %s: %s", draft.version, draft.name, reason)
    return draft


def one_at_a_time(draft: str) -> AbstractContextManager[None]:
    """A turn at promoting a draft: whom it is to replace, and whom a failed smoke test brings back, stay the same.

    A private server has one flow.
    """
    return nullcontext() if prefect_is_private() else occupy(f"promotion-of-{draft}", 1, 1, TIMEOUT_S)


def next_step(
    uri: str, draft: RegisteredDraft, gate: GateDecision, *, approval: bool
) -> tuple[Literal["promote", "refuse", "ask", "leave"], str]:
    """What is to be done with a version, and why."""
    decided = any(decision.version == draft.version for decision in history(uri, draft.name))
    if decided and registry.CHAMPION in draft.aliases and registry.SMOKE_TEST not in draft.tags:
        return "promote", gate.reason  # its smoke test was interrupted
    if decided:
        return "leave", "it was decided on before"
    if registry.CHALLENGER not in draft.aliases:
        return "leave", "it is not the challenger any more"
    if not gate.passed:
        return "refuse", gate.reason
    if why := _superseded(uri, draft):
        return "refuse", why
    return ("ask", "it waits for approval") if approval else ("promote", gate.reason)


def _superseded(uri: str, draft: RegisteredDraft) -> str | None:
    """Why a version's benchmark proves nothing any more: it was compared with a draft that is not the champion."""
    present = registry.champion(uri, draft.name)
    now, then = str(present.version) if present else "", draft.tags.get(registry.MEASURED_AGAINST, "")
    if now == then:
        return None
    compared = f"version {then}" if then else "no draft"
    return f"it was compared with {compared}, and {f'version {now}' if now else 'none'} is champion now: retrain"


def put_into_service(run: OpenRun, pool: Pool, draft: RegisteredDraft, by: str, reason: str) -> RegisteredDraft:
    """Make it champion if it decodes, loaded from the registry as serving does, as it was benchmarked.

    The version before is champion again where it does not, and on every other end of the smoke test.
    """
    uri = run.tracking_uri
    promoted = move_alias(uri, draft, by, reason)
    with ExitStack() as probation:
        probation.push(partial(_end_probation, uri, promoted))
        result = smoke_test(run, pool, promoted)
        tested = note_smoke_test(uri, promoted, result)
        if not result.passed:
            raise SmokeTestFailedError(result.reason)
        announce(tested)
    return registry.find_version(uri, draft.name, draft.version)


def _end_probation(
    uri: str, draft: RegisteredDraft, kind: type[BaseException] | None, error: BaseException | None, _where: object
) -> bool:
    """After a bad end, a cancelled flow's too, the draft leaves service; a failed smoke test ends here."""
    if kind is None:
        return False
    withdraw(uri, draft, SMOKE_TEST, str(error) or kind.__name__)
    return issubclass(kind, SmokeTestFailedError)


@task(name="refuse draft", **RETRIES)
def refuse_draft(uri: str, draft: RegisteredDraft, by: str, reason: str) -> RegisteredDraft:
    """It stays what it is, and the reason is kept."""
    refused = registry.refuse(uri, draft, by=by, reason=reason)
    get_run_logger().info("version %s of %s is not promoted: %s", draft.version, draft.name, reason)
    return refused


@task(name="move alias", **RETRIES)
def move_alias(uri: str, draft: RegisteredDraft, by: str, reason: str) -> RegisteredDraft:
    """Make it champion."""
    promoted = registry.promote(uri, draft.name, draft.version, by=by, reason=reason)
    get_run_logger().info("version %s of %s is champion, if it passes the smoke test", draft.version, draft.name)
    return promoted


@task(name="smoke test", retries=1, retry_condition_fn=worth_retrying, cache_policy=NO_CACHE)
def smoke_test(run: OpenRun, pool: Pool, draft: RegisteredDraft) -> SmokeResult:
    """Download the champion as serving does, and decode a few prompts of its benchmark again."""
    with TemporaryDirectory(dir=run.folder.path, prefix="registry-") as downloaded:
        export, counts = Path(downloaded) / "export", Path(downloaded) / "request_counts.json"
        registry.download(run.tracking_uri, draft, export)
        write_atomically(counts, registry.read_artifact(run.tracking_uri, draft, registry.REQUEST_COUNTS))
        run_main(run, pool, "smoke-test", "models.benchmark.smoke", str(export), str(counts), timeout_s=TIMEOUT_S)
    return SmokeResult.read(run.folder.smoke)


@task(name="note smoke test", **RETRIES)
def note_smoke_test(uri: str, draft: RegisteredDraft, result: SmokeResult) -> RegisteredDraft:
    """Keep with the version what the smoke test said."""
    return registry.note_smoke_test(uri, draft, result.passed, result.reason)


@task(name="withdraw draft", **RETRIES)
def withdraw(uri: str, draft: RegisteredDraft, by: str, reason: str) -> RegisteredDraft | None:
    """Take it out of service; the version that serves now, if any."""
    now = registry.withdraw(uri, draft, by=by, reason=reason)
    serves = f"version {now.version} serves" if now else "no draft serves"
    get_run_logger().error("version %s of %s is withdrawn, %s: %s", draft.version, draft.name, serves, reason)
    tell(draft, WITHDRAWN, now=now.version if now else None, reason=reason)
    return now


@task(name="announce", **RETRIES)
def announce(draft: RegisteredDraft) -> None:
    """Tell the serving side which version it is to load."""
    tell(draft, PROMOTED)
    get_run_logger().info("version %s of %s is champion", draft.version, draft.name)


def tell(draft: RegisteredDraft, event: str, **more: object) -> None:
    """Emit an event about a version; its resource is the registered model."""
    emit_event(event, {"prefect.resource.id": draft.name}, payload={"version": draft.version, **more})


@task(name="ask for approval", **RETRIES)
def ask_for_approval(draft: RegisteredDraft, tracking_uri: str | None) -> str | None:
    """Submit the deployment that asks a person, once per version; the flow run's id, None where there is none.

    `tracking_uri` is the recipe's: the environment's may hold a password, and parameters are shown.
    """
    by_hand = f"draftsmith drafts promote {draft.version} --name {draft.name}"
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(APPROVAL)
        except ObjectNotFound:
            get_run_logger().warning("version %s waits for your approval: %s", draft.version, by_hand)
            return None
    submitted = run_deployment(
        deployment.id,
        parameters={"draft": draft.name, "version": draft.version, "tracking_uri": tracking_uri},
        timeout=0,
        as_subflow=False,
        idempotency_key=f"approve-{draft.model_id}",
    )
    assert isinstance(submitted, FlowRun)
    get_run_logger().info("version %s waits for approval: flow run %s, or %s", draft.version, submitted.name, by_hand)
    return str(submitted.id)
