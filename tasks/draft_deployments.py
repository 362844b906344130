"""The deployments of one draft, from its recipe: retrain, regenerate, promote, benchmark-champion, watch-traffic."""

import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from pydantic import ValidationError

from infra.drift.config import WatchConfig
from infra.files.atomic import write_atomically
from infra.files.locks import Lock, LockHeldError, hold
from infra.records.data_path import Record
from infra.refusal import Refusal
from infra.servers.stack import WORK_POOLS
from models.config.data import LIVE
from models.config.recipe import RunConfig
from tasks.deployments import DeploymentRecord, Settings, all_pages, deploy, folder_of, recovery_folder
from tasks.events import DRIFTED, EVERY, PROMOTED, UNPROVEN
from tasks.side_effects import draft_tag

FILE = "prefect.yaml"
HEAD: dict[str, Any] = {"name": "draftsmith", "build": [], "push": [], "pull": []}
"""As in the shared prefect.yaml: the project is installed where the worker runs."""
OTHERS_S = 30.0
"""Longer than a killed command leaves Prefect's own behind, which is told to stop at once."""
HEARTBEAT_S = 30
"""As in the shared prefect.yaml: `recover` takes a flow run for dead after 90 s of silence."""
ONE, SKIP = {"limit": 1, "collision_strategy": "ENQUEUE"}, {"limit": 1, "collision_strategy": "CANCEL_NEW"}
BODY = """{{ event.event }}: {{ event.payload.model_uri or event.payload.draft }}
{{ event.payload.reason }}
{% for name, link in event.payload.links.items() %}{{ name }}: {{ link }}
{% endfor %}"""


RETRAIN, WATCH = "retrain", "every-quarter-hour"
"""Slugs of the schedules that `--pause` stops."""


class DeployOptions(Record):
    """What a person asked for beside the recipe. An option that is left out keeps its last value."""

    cron: str | None = None
    """When to retrain."""
    watch: tuple[str, ...] = ()
    """Addresses of the servers whose traffic is watched."""
    requests: str | None = None
    """Where the servers log their requests, of which fresh prompts are taken."""
    notify: tuple[str, ...] = ()
    """Notification blocks, TYPE/NAME."""
    paused: bool = False
    folder: str | None = None
    """Where runs start; None: the current folder."""
    taken_over: tuple[UUID, ...] = ()
    """Automations that were paused because this deployment does the same."""


def deploy_draft(folder: Path, config: RunConfig, given: DeployOptions) -> tuple[list[str], list[str]]:
    """Create or update the deployments of a recipe's draft; what an operator changed stays, but for what `given` sets.

    Options that `given` does not set are those of the last time. Returns the deployments' names, and what stays.
    `folder` is for the lock, Prefect's file and logs. Raises Refusal for a schedule or an address that cannot be used,
    for a notification block that is not there, and while another command deploys this draft.
    """
    if given.cron:
        _check_cron(given.cron)
    draft, place = config.draft_name, folder / config.draft_name
    options = remembered(draft).model_copy(update=given.model_dump(exclude_unset=True))
    deployments = list(described(config, options))
    names = [f"{each['entrypoint'].rpartition('.')[2].replace('_', '-')}/{each['name']}" for each in deployments]
    triggers = [trigger["name"] for each in deployments for trigger in each.get("triggers", ())]
    with get_client(sync_client=True) as client:
        _check_owner(client, draft, names)
        blocks = {name: _block(client, name) for name in options.notify}
        with _alone(folder, draft) as lock:
            place.mkdir(parents=True, exist_ok=True)
            replaced = {_name(client, one): one for one in of_draft(client, draft)}
            for name in names:
                replaced.pop(name, None)
            write_atomically(place / FILE, yaml.safe_dump(HEAD | {"deployments": deployments}))
            stays = deploy(
                place,
                place / FILE,
                draft,
                [*names, *triggers],
                (lock.descriptor,),
                renamed=_renamed(replaced, names, triggers),
                overrule=partial(overruled, given=given),
            )
            # Last: what was changed of them counts until their successors have it.
            _delete(client, replaced.values())
            others = _others_of(client, draft)
            taken_over = dict.fromkeys([*remembered(draft).taken_over, *others])
            # First: killed in between, the next `undeploy` knows of them.
            known = options.model_copy(update={"taken_over": tuple(taken_over)})
            DeploymentRecord.of(draft).keep(draft, options=known.model_dump(mode="json"))
            for other in others:
                client.pause_automation(other)
            for block, document in blocks.items():
                _tell(client, draft, block, document)
    return names, stays


def _renamed(replaced: Iterable[str], names: Iterable[str], triggers: Iterable[str]) -> dict[str, str]:
    """Deployments of the recipe's earlier name and their triggers -> those of its name today."""
    renamed = dict[str, str]()
    for old in replaced:
        new = next((name for name in names if name.partition("/")[0] == old.partition("/")[0]), None)
        if new:
            renamed |= {old + one.removeprefix(new): one for one in (new, *triggers) if f"{one} ".startswith(f"{new} ")}
    return renamed


def overruled(kept: Settings, fresh: Settings, given: DeployOptions) -> Settings:
    """`kept`, but what a given option sets as in `fresh`, whatever was changed in Prefect before."""
    schedules, parameters = dict(kept["schedules"]), dict(kept["parameters"])
    if "cron" in given.model_fields_set and RETRAIN in fresh["schedules"]:
        schedules[RETRAIN] = fresh["schedules"][RETRAIN]
    if "paused" in given.model_fields_set:
        for slug in {RETRAIN, WATCH} & schedules.keys() & fresh["schedules"].keys():
            schedules[slug] = schedules[slug] | {"active": fresh["schedules"][slug]["active"]}
        kept = {**kept, "paused": fresh["paused"]}
    for option, key in (("watch", "servers"), ("requests", "requests")):
        if option in given.model_fields_set and key in (new := fresh["parameters"].get("config", {})):
            parameters["config"] = {**parameters.get("config", new), key: new[key]}
    return {**kept, "schedules": schedules, "parameters": parameters}


def _check_owner(client: SyncPrefectClient, draft: str, names: Collection[str]) -> None:
    """Raise Refusal where deployments of these names are another draft's."""
    tag = draft_tag(draft)
    for one in all_pages(client.read_deployments):
        owner = next((other for other in one.tags if other.startswith(draft_tag("")) and other != tag), None)
        if owner and _name(client, one) in names:
            other = owner.removeprefix(draft_tag(""))
            raise Refusal(
                f"{_name(client, one)} is deployed for {other}, and the recipe is {draft}'s now: "
                f"`draftsmith undeploy {other}` first, or give the recipe another name"
            )


def folder_in_force(draft: str) -> str | None:
    """The folder in which the draft's runs start by what is deployed; before its first deployment that of `recover`."""
    with get_client(sync_client=True) as client:
        return next(filter(None, map(folder_of, of_draft(client, draft))), None) or recovery_folder(client)


def _check_cron(cron: str) -> None:
    try:
        CronSchedule(cron=cron)
    except ValidationError as error:
        raise Refusal(
            f"--cron {cron!r} is no schedule ({error.errors()[0]['msg']}): write minute, hour, day, month and weekday, "
            "for instance '0 3 * * 0'"
        ) from None


def remembered(draft: str) -> DeployOptions:
    """The options that the draft was deployed with last."""
    return DeployOptions.model_validate(DeploymentRecord.of(draft).options or {})


def undeploy_draft(folder: Path, draft: str) -> int:
    """Delete a draft's deployments with their schedules, waiting runs and automations. Returns how many there were.

    Raises Refusal while another command deploys this draft.
    """
    with _alone(folder, draft) as lock, get_client(sync_client=True) as client:
        found, taken_over = of_draft(client, draft), remembered(draft).taken_over
        _delete(client, found)
        for automation in all_pages(client.read_automations):
            if automation.name.startswith(_notice(draft, "")):
                client.delete_automation(automation.id)
            elif automation.id in taken_over:
                client.resume_automation(automation.id)
        shutil.rmtree(folder / draft, ignore_errors=True)
        # Last: killed before, the command can be given again.
        DeploymentRecord.forget(draft)
        lock.path.unlink()
    return len(found)


@contextmanager
def _alone(folder: Path, draft: str) -> Iterator[Lock]:
    """One command for a draft at a time. One that was killed is waited for until Prefect's own is gone with it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with hold(folder / f"{draft}.lock", wait_s=OTHERS_S) as lock:
            yield lock
    except LockHeldError as error:
        raise Refusal(f"another command deploys {draft} at this moment: try again when it has ended") from error


def of_draft(client: SyncPrefectClient, draft: str) -> list[DeploymentResponse]:
    """All deployments of a draft."""
    tags = DeploymentFilterTags(all_=[draft_tag(draft)])
    return all_pages(client.read_deployments, deployment_filter=DeploymentFilter(tags=tags))


def described(config: RunConfig, options: DeployOptions) -> Iterable[dict[str, Any]]:
    """A draft's deployments as prefect.yaml has them."""
    draft, tree = config.draft_name, config.model_dump(mode="json", exclude_unset=True)
    # No limit: Prefect ends a run whose slot it cannot renew, and trainings of one draft wait for each other anyway.
    retrain = _deployment("retrain_draft.retrain", config, options, {"config": tree}, resumable=True)
    if options.cron:
        retrain["schedules"] = [_schedule(RETRAIN, options.cron, options)]
    again = [_when_promoted(draft, tree)] if config.data.source == LIVE else []
    yield retrain | {"triggers": [_on_drift(draft, tree), *again]}
    if config.data.regeneration is not None:
        yield _deployment("regenerate_text.regenerate", config, options, {"config": tree}, resumable=True, limit=ONE)
    named = {"draft": draft}
    yield _deployment("promote_draft.promote", config, options, named, resumable=True, limit=ONE)
    yield _deployment("roll_back_draft.rollback", config, options, named | {"reason": ""}, pool=WORK_POOLS[1])
    nightly = _deployment("benchmark_champion.benchmark_champion", config, options, named, resumable=True, limit=SKIP)
    yield nightly | {"schedules": [_schedule("nightly", "0 2 * * *", options) | {"active": False}]}
    if options.watch:
        watched = {"config": _watched(config, options)}
        watch = _deployment("watch_traffic.watch_traffic", config, options, watched, limit=SKIP)
        yield watch | {"schedules": [{"slug": WATCH, "interval": 900, "active": not options.paused}]}


def _watched(config: RunConfig, options: DeployOptions) -> dict[str, Any]:
    """Settings of the watch. Raises Refusal for an address that it would not take: Prefect's schema would say so only
    after the address, perhaps with a password, was written down."""
    watched: dict[str, Any] = {"draft": config.draft_name, "servers": list(options.watch)}
    watched["traffic"] = config.promotion.traffic.sampling
    if options.requests:
        watched["requests"] = {"folder": options.requests}
    try:
        WatchConfig.model_validate(watched)
    except ValidationError as error:
        fault = error.errors()[0]
        option = "--requests" if fault["loc"][0] == "requests" else "--watch"
        raise Refusal(f"{option} {fault['input']}: {fault['msg']}") from None
    return watched


def _deployment(
    entrypoint: str,
    config: RunConfig,
    options: DeployOptions,
    parameters: dict[str, Any],
    *,
    resumable: bool = False,
    limit: dict[str, Any] | None = None,
    pool: str = WORK_POOLS[0],
) -> dict[str, Any]:
    variables = {
        "working_dir": options.folder or "{{ $PWD }}",
        "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)},
    }
    flow = entrypoint.rpartition(".")[2].replace("_", "-")
    found: dict[str, Any] = {
        "name": config.name,
        "description": f"{flow} of {config.draft_name}",
        "entrypoint": f"flows.{entrypoint}",
        "tags": ["draftsmith", draft_tag(config.draft_name), *(["draftsmith-resumable"] if resumable else [])],
        "enforce_parameter_schema": True,
        "paused": options.paused,
        "parameters": parameters,
        "work_pool": {"name": pool, "work_queue_name": "default", "job_variables": variables},
    }
    return found | ({"concurrency_limit": limit} if limit else {})


def _schedule(slug: str, cron: str, options: DeployOptions) -> dict[str, Any]:
    return {"slug": slug, "cron": cron, "timezone": "UTC", "active": not options.paused}


def _on_drift(draft: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Retrain on fresh prompts, from the champion or the furthest draft, when traffic has drifted."""
    data, training = tree.get("data", {}), tree.get("training", {})
    source: Any = {"__prefect_kind": "jinja", "template": _fresh_or(data.get("source", "python-docs"))}
    if data.get("source") == LIVE:
        source = LIVE
    start = "furthest" if training.get("start_from") == "furthest" else "champion"
    config = tree | {"data": data | {"source": source}, "training": training | {"start_from": start}}
    return {
        "type": "event",
        "name": f"retrain/{tree['name']} when {draft} drifts",
        "expect": [DRIFTED],
        "match": {"prefect.resource.id": draft},
        "parameters": {"config": config},
    }


def _when_promoted(draft: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Learn from users again once a draft that learned from them is in service, or is ahead by too little to be sure:
    the loop ends with the first that is neither."""
    return {
        "type": "event",
        "name": f"retrain/{tree['name']} again when {draft} is promoted",
        "expect": [PROMOTED, UNPROVEN],
        "match": {"prefect.resource.id": draft},
        "parameters": {"config": tree},
    }


def _fresh_or(source: str) -> str:
    quoted = source.replace("\\", "\\\\").replace("'", "\\'")
    return "{{ event.payload.dataset or '" + quoted + "' }}"


def _name(client: SyncPrefectClient, deployment: DeploymentResponse) -> str:
    return f"{client.read_flow(deployment.flow_id).name}/{deployment.name}"


def _delete(client: SyncPrefectClient, deployments: Iterable[DeploymentResponse]) -> None:
    for found in deployments:
        client.delete_resource_owned_automations(f"prefect.deployment.{found.id}")
        client.delete_deployment(found.id)


def _others_of(client: SyncPrefectClient, draft: str) -> list[UUID]:
    """Enabled triggers of other deployments that an alarm of this draft starts, such as the quickstart's in the shared
    prefect.yaml: one retraining is enough."""
    own, found = {one.id for one in of_draft(client, draft)}, list[UUID]()
    for automation in all_pages(client.read_automations):
        trigger, started = automation.trigger, {getattr(action, "deployment_id", None) for action in automation.actions}
        if not isinstance(trigger, EventTrigger) or DRIFTED not in trigger.expect or started & own:
            continue
        if automation.enabled and trigger.model_dump(mode="json")["match"].get("prefect.resource.id") == draft:
            found.append(automation.id)
    return found


def _block(client: SyncPrefectClient, name: str) -> Any:
    kind, _, own = name.partition("/")
    try:
        return client.read_block_document_by_name(own, kind)
    except ObjectNotFound:
        raise Refusal(
            f"--notify {name}: there is no such block. Create one in Prefect's page (Blocks, for instance Slack "
            "Webhook), and give its type and name, for instance slack-webhook/ops"
        ) from None


def _notice(draft: str, block: str) -> str:
    return f"tell of {draft} by {block}"


def _tell(client: SyncPrefectClient, draft: str, block: str, document: Any) -> None:
    """Send what happens to a draft to a notification block; an automation that an operator disabled stays so."""
    trigger = EventTrigger(expect={EVERY}, match={"prefect.resource.id": draft}, posture=Posture.Reactive)
    action = SendNotification(block_document_id=document.id, subject=f"Draftsmith: {draft}", body=BODY)
    wanted = AutomationCore(name=_notice(draft, block), trigger=trigger, actions=[action])
    existing = {automation.name: automation for automation in all_pages(client.read_automations)}.get(wanted.name)
    if existing:
        client.update_automation(existing.id, wanted.model_copy(update={"enabled": existing.enabled}))
    else:
        client.create_automation(wanted)
