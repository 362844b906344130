"""Deploys a file of deployments again and again without undoing what the operator changed.

`python -m tasks.deployments FOLDER`: `prefect deploy` replaces a deployment as a whole, so a schedule that somebody
activated would be off again after the next start. Here every setting that differs from what was deployed last time is
the operator's and stays; every other one follows prefect.yaml. What was deployed is kept in Prefect, as a block, so
that it does not matter from which folder or machine the next command comes. FOLDER is for logs.
"""

import argparse
import platform
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled
from pydantic import Field

from infra.processes.exit import run_main
from infra.processes.process import Owner, module, start
from infra.records.data_path import Record
from infra.refusal import Refusal
from infra.servers.stack import WORK_POOLS
from tasks.side_effects import artifact_key

DEPLOY_S = 180.0
PAGE = 200
Found = TypeVar("Found")
Settings = Mapping[str, Any]
"""What an operator may change of a deployment. Schedules are known by slug, or by id if somebody added one without."""
RECOVER = "recover/recover"
"""The one among prefect.yaml's own deployments that shows whose they are."""
EPOCH = datetime.fromtimestamp(0, UTC)
OTHERS_S = 2 * DEPLOY_S
"""A command of another machine has ended, or died, after this time."""


class Deployed(Record):
    """All deployments, by flow and name, and which automations are enabled, by name."""

    deployments: Mapping[str, Settings] = {}
    automations: Mapping[str, bool] = {}

    def renamed(self, names: Mapping[str, str]) -> "Deployed":
        """The same with these deployments and automations under new names; one that has a new name already counts."""

        def under_new(values: Mapping[str, Found]) -> dict[str, Found]:
            moved = {names[old]: values[old] for old in names.keys() & values.keys()}
            return moved | {name: value for name, value in values.items() if name not in names}

        return Deployed(deployments=under_new(self.deployments), automations=under_new(self.automations))

    def over(self, before: "Deployed", fresh: "Deployed") -> "Deployed":
        """What was deployed last, after a call that may have deployed a part only: what differs from `before` is of
        this call."""
        deployments = {name: new for name, new in fresh.deployments.items() if new != before.deployments.get(name)}
        automations = {name: new for name, new in fresh.automations.items() if new != before.automations.get(name)}
        return Deployed(
            deployments={**self.deployments, **deployments}, automations={**self.automations, **automations}
        )


class DeploymentRecord(Block):
    """What was deployed last under one name; Prefect keeps it."""

    _block_type_name = "Draftsmith deployments"
    _description = (
        "Kept by `draftsmith deploy` and `up`, which tell by it what you have changed since. Do not edit it: change "
        "the deployments."
    )

    options: dict[str, Any] | None = Field(
        default=None, title="Options", description="What was asked for beside the recipe; empty for those of up."
    )
    by: str | None = Field(default=None, title="Machine", description="Where the last command ran.")
    since: datetime = Field(default=EPOCH, title="Began", description="When the last command began.")
    last: dict[str, Any] | None = Field(default=None, title="Deployed", description="What was deployed last.")
    interrupted: dict[str, Any] | None = Field(
        default=None, title="Before", description="What there was before a command that has not ended."
    )

    @classmethod
    def of(cls, draft: str | None) -> "DeploymentRecord":
        """The record of a draft's deployments, or of prefect.yaml's own; an empty one where there is none."""
        try:
            return cls.load(_record_key(draft))  # pyright: ignore[reportReturnType]
        except ValueError:
            return cls()

    def keep(self, draft: str | None, **changes: Any) -> "DeploymentRecord":
        """Store the record with these changes; returns it."""
        changed = DeploymentRecord(**(self.model_dump(include=RECORDED) | changes))
        changed.save(_record_key(draft), overwrite=True)
        return changed

    @classmethod
    def forget(cls, draft: str) -> None:
        """Remove the draft's record, if there is one."""
        with suppress(ValueError):
            cls.delete(_record_key(draft))

    def refuse_other(self, what: str) -> None:
        """Raise Refusal while another machine deploys the same: each would restore what it found half done."""
        age_s = (datetime.now(UTC) - self.since).total_seconds()
        if self.interrupted and self.by != platform.node() and age_s < OTHERS_S:
            raise Refusal(
                f"{what}: a command on {self.by} deploys the same since {age_s:.0f} s: try again "
                f"when it has ended; one that died is passed over after {OTHERS_S:.0f} s"
            )


RECORDED = {"last", "interrupted", "options", "by", "since"}


def _record_key(draft: str | None) -> str:
    return "deployed-stack" if draft is None else artifact_key("deployed-draft", draft)


def deploy(
    folder: Path,
    file: Path = Path("prefect.yaml"),
    draft: str | None = None,
    only: Collection[str] | None = None,
    locks: tuple[int, ...] = (),
    *,
    renamed: Mapping[str, str] = MappingProxyType({}),
    overrule: Callable[[Settings, Settings], Settings] = lambda kept, _fresh: kept,
) -> list[str]:
    """Bring a file of deployments into force; by default the current folder's. `folder` is for logs.

    Returns what was changed in Prefect and stays, as in `retrain/mine: parameters.config.seed`.

    `draft`: whose deployments they are; None: prefect.yaml's own. `only` names the file's deployments (FLOW/NAME) and
    automations: what is kept of an interrupted call is soon out of date for all others. None: all are the file's.

    `renamed`: deployments and automations in force whose changes their successors take over: old names -> new ones.

    `overrule`: returns what is to be in force, from what keeps the operator's changes and from what was deployed.

    `locks`: descriptors of locks that stay held until Prefect's command is gone, which a killed process leaves behind
    for a moment.

    Raises ProcessFailedError with Prefect's own words, TimeoutError, and Refusal while another machine deploys the
    same.
    """
    with get_client(sync_client=True) as client:
        for pool in WORK_POOLS:
            _ensure_pool(client, pool)
        record = DeploymentRecord.of(draft)
        record.refuse_other(draft or str(file))
        found = record.interrupted or _read_all(client, only and {*only, *renamed}).model_dump(mode="json")
        before = Deployed.model_validate(found).renamed(renamed)
        under_way = {"interrupted": before.model_dump(mode="json"), "by": platform.node(), "since": datetime.now(UTC)}
        record = record.keep(draft, **under_way)
        command = module("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file))
        # prefect.yaml takes its working_dir from $PWD, which `make -C` and subprocess(cwd=...) leave as it was.
        here = {"PWD": str(Path.cwd())}
        process = start("prefect-deploy", command, Owner("deploy", folder / "logs", locks=locks), here)
        whole = False
        try:
            process.wait(DEPLOY_S)
            whole = True
        finally:
            process.stop()
            # Also where the command failed: what it has deployed by then must not undo what the operator changed.
            fresh = _read_all(client, only)
            # Without a record nobody knows what is the operator's: the file counts.
            last = Deployed.model_validate(record.last).renamed(renamed) if record.last else before
            stays = _restore(client, before, last, fresh, overrule)
            last = fresh if whole else last.over(before, fresh)
            record.keep(draft, last=last.model_dump(mode="json"), interrupted=None)
    return stays


def folder_of(deployment: DeploymentResponse) -> str | None:
    """The folder in which a deployment's runs start, which holds its runs folder by default."""
    return deployment.job_variables.get("working_dir")


def recovery_folder(client: SyncPrefectClient) -> str | None:
    """The folder in which `recover` starts; None where prefect.yaml is not deployed."""
    try:
        return folder_of(client.read_deployment_by_name(RECOVER))
    except ObjectNotFound:
        return None


def refuse_other_installation(folder: Path) -> None:
    """Raise Refusal where prefect.yaml's own deployments were deployed from another folder than this one."""
    with get_client(sync_client=True) as client:
        theirs = recovery_folder(client)
    if theirs and Path(theirs).resolve() != folder.resolve():
        raise Refusal(
            f"`recover` and the other deployments of prefect.yaml start in {theirs}, and this is {folder}: they belong "
            "to another installation. Let each team have a Prefect workspace and an MLflow of its own; where the "
            "project has moved, take them over with `draftsmith up --take-over`"
        )


def schedule_interrupted() -> list[str]:
    """Schedule again what workers of prefect.yaml's pools were submitting when they ended; names of these flow runs.

    A worker takes only Scheduled flow runs, and `recover` knows only those that had run. To be called while no worker
    and no flow of these pools lives: it would be submitted twice.
    """
    of_our_pools = WorkPoolFilter(name=WorkPoolFilterName(any_=list(WORK_POOLS)))
    submitting = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING])))
    with get_client(sync_client=True) as client:
        interrupted = all_pages(client.read_flow_runs, flow_run_filter=submitting, work_pool_filter=of_our_pools)
        for flow_run in interrupted:
            again = Scheduled(message="its worker ended while it submitted this flow run")
            # By force, because Prefect's usual rules would let the state keep the concurrency lease that ends here.
            client.set_flow_run_state(flow_run.id, again, force=True)
    return [flow_run.name for flow_run in interrupted]


def _ensure_pool(client: SyncPrefectClient, name: str) -> None:
    """Create a missing work pool; an existing one keeps its limits."""
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def all_pages(read: Callable[..., list[Found]], **wanted: Any) -> list[Found]:
    """What a client's method finds, page by page: the server gives at most 200 at once."""
    found: list[Found] = []
    while page := read(limit=PAGE, offset=len(found), **wanted):
        found += page
    return found


def _deployments(client: SyncPrefectClient) -> dict[str, DeploymentResponse]:
    flows = {flow.id: flow.name for flow in all_pages(client.read_flows)}
    found = all_pages(client.read_deployments)
    return {f"{flows[one.flow_id]}/{one.name}": one for one in found if one.work_pool_name in WORK_POOLS}


def _read_all(client: SyncPrefectClient, only: Collection[str] | None) -> Deployed:
    deployments, automations = _deployments(client), all_pages(client.read_automations)
    return Deployed(
        deployments={name: _settings(one) for name, one in deployments.items() if only is None or name in only},
        automations={one.name: one.enabled for one in automations if only is None or one.name in only},
    )


def _settings(found: DeploymentResponse) -> Settings:
    limit, options = found.global_concurrency_limit, found.concurrency_options
    return {
        "paused": found.paused,
        "limit": limit.limit if limit else None,
        "collision": options.collision_strategy.value if options else None,
        "parameters": found.parameters,
        "schedules": {
            one.slug or str(one.id): {"active": one.active, "schedule": one.schedule.model_dump(mode="json")}
            for one in found.schedules
        },
    }


def _restore(
    client: SyncPrefectClient,
    before: Deployed,
    last: Deployed,
    fresh: Deployed,
    overrule: Callable[[Settings, Settings], Settings],
) -> list[str]:
    """Give deployments and automations back what was the operator's; returns what that is."""
    stays = list[str]()
    for name, found in _deployments(client).items():
        if name not in before.deployments or name not in fresh.deployments:
            continue
        now, new = before.deployments[name], fresh.deployments[name]
        kept = overrule(keep_changes(now, last.deployments.get(name, new), new), new)
        if kept != new:
            client.update_deployment(found.id, _update(kept))
            stays += [f"{name}: {place}" for place in _differing(kept, new)]
    for automation in all_pages(client.read_automations):
        was = before.automations.get(automation.name)
        if was is not None and was != last.automations.get(automation.name, automation.enabled):
            (client.resume_automation if was else client.pause_automation)(automation.id)
    return stays


def keep_changes(before: Settings, last: Settings, fresh: Settings) -> Settings:
    """`fresh`, with whatever was changed, added or removed in `before` since `last` was deployed, value by value."""
    kept = dict(fresh)
    for key in {*before, *last}:
        if key not in before:
            kept.pop(key, None)
        elif key not in last:
            kept[key] = before[key]
        elif isinstance(before[key], Mapping) and isinstance(last[key], Mapping):
            new = fresh.get(key)
            if isinstance(new, Mapping):  # else the file no longer has this schedule or section
                kept[key] = keep_changes(before[key], last[key], new)
        elif before[key] != last[key]:
            kept[key] = before[key]
    return kept


def _differing(kept: Settings, fresh: Settings) -> list[str]:
    """Places of the values in which the two differ, as in `parameters.config.seed`."""
    found = list[str]()
    for key in sorted({*kept, *fresh}):
        one, other = kept.get(key), fresh.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += [f"{key}.{place}" for place in _differing(one, other)]
        elif one != other:
            found.append(key)
    return found


def _update(kept: Settings) -> DeploymentUpdate:
    options = {"collision_strategy": kept["collision"]} if kept["collision"] else None
    return DeploymentUpdate.model_validate(
        {
            "paused": kept["paused"],
            "concurrency_limit": kept["limit"],
            "concurrency_options": options,
            "parameters": kept["parameters"],
            "schedules": [{"slug": slug, **schedule} for slug, schedule in kept["schedules"].items()],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--take-over", action="store_true", help="also from another installation")
    parser.add_argument("--no-workers", action="store_true", help="none lives: schedule what they were submitting")
    options = parser.parse_args()
    if not options.take_over:
        refuse_other_installation(Path.cwd())
    deploy(options.folder)
    if options.no_workers:
        for name in schedule_interrupted():
            print(f"{name} is scheduled again: its worker ended while it submitted it")


if __name__ == "__main__":
    run_main(main)
