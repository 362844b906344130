"""Deploys a file of deployments again and again without undoing what the operator changed.

`python -m tasks.deployments FOLDER`: `prefect deploy` replaces a deployment as a whole, so a schedule that somebody
activated would be off again after the next start. Here every setting that differs from what was deployed last time is
the operator's and stays; every other one follows prefect.yaml. FOLDER keeps what was deployed.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import Owner, module, start
from infra.records.data_path import Record
from infra.servers.stack import WORK_POOLS

DEPLOY_S = 180.0
PAGE = 200
Found = TypeVar("Found")
Settings = Mapping[str, Any]
"""What an operator may change of a deployment. Schedules are known by slug, or by id if somebody added one without."""
WHOLE = ("parameters", "schedule")
"""Settings that are kept or replaced as a whole."""


class Deployed(Record):
    """All deployments, by flow and name, and which automations are enabled, by name."""

    deployments: Mapping[str, Settings] = {}
    automations: Mapping[str, bool] = {}


def deploy(
    folder: Path,
    file: Path = Path("prefect.yaml"),
    only: Collection[str] | None = None,
    locks: tuple[int, ...] = (),
) -> None:
    """Bring a file of deployments into force; by default the current folder's. `folder` keeps what was deployed.

    `only` names the file's deployments (FLOW/NAME) and automations: what is kept of an interrupted call is soon out of
    date for all others. None: all are the file's.

    `locks`: descriptors of locks that stay held until Prefect's command is gone, which a killed process leaves behind
    for a moment.

    Raises ProcessFailedError with Prefect's own words, and TimeoutError.
    """
    last, interrupted = folder / "deployed.json", folder / "deployed-before.json"
    with get_client(sync_client=True) as client:
        for pool in WORK_POOLS:
            _ensure_pool(client, pool)
        if not interrupted.exists():
            write_atomically(interrupted, _read_all(client, only))
        before = Deployed.read(interrupted)
        command = module("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file))
        process = start("prefect-deploy", command, Owner("deploy", folder / "logs", locks=locks))
        try:
            process.wait(DEPLOY_S)
        finally:
            process.stop()
        fresh = _read_all(client, only)
        _restore(client, before, Deployed.read(last) if last.exists() else fresh, fresh)
    write_atomically(last, fresh)
    interrupted.unlink()


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


def _restore(client: SyncPrefectClient, before: Deployed, last: Deployed, fresh: Deployed) -> None:
    """Give deployments and automations back what was the operator's."""
    for name, found in _deployments(client).items():
        if name not in before.deployments:
            continue
        now = before.deployments[name]
        kept = keep_changes(now, last.deployments.get(name, fresh.deployments[name]), fresh.deployments[name])
        if kept != fresh.deployments[name]:
            client.update_deployment(found.id, _update(kept))
    for automation in all_pages(client.read_automations):
        was = before.automations.get(automation.name)
        if was is not None and was != last.automations.get(automation.name, automation.enabled):
            (client.resume_automation if was else client.pause_automation)(automation.id)


def keep_changes(before: Settings, last: Settings, fresh: Settings) -> Settings:
    """`fresh`, with whatever was changed, added or removed in `before` since `last` was deployed."""
    kept = dict(fresh)
    for key in {*before, *last}:
        if key not in before:
            kept.pop(key, None)
        elif key not in last:
            kept[key] = before[key]
        elif isinstance(before[key], Mapping) and key not in WHOLE:
            if key in kept:  # else the file no longer has this schedule
                kept[key] = keep_changes(before[key], last[key], kept[key])
        elif before[key] != last[key]:
            kept[key] = before[key]
    return kept


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
    deploy(parser.parse_args().folder)


if __name__ == "__main__":
    run_main(main)
