"""Holds a placement group of a Ray cluster for as long as this process lives. One process per lease.

`python -m infra.pools.ray_holder --address A --request JSON` prints why it waits, then `granted JSON`, and ends with an
error when the group is taken away. `--withdraw NAME` takes one away.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.pools.queued import GRANTED, say
from infra.pools.ray_cluster import STARTED_S, anchor_name, connect, on_bundle
from infra.pools.ray_remote import Anchor
from infra.pools.requests import Grant, GrantedPart, Machine, Part, Request, refuse_what_never_fits
from infra.processes.exit import run_main
from infra.refusal import Refusal

POLL_S = 1.0
REMOVED_S = 60.0


@contextmanager
def placed(request: Request) -> Iterator[Any]:
    """The placement group, asked for; Ray admits it when it fits."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([_resources(part) for part in request.parts], strategy="PACK", name=request.name)
    try:
        yield group
    finally:
        remove_placement_group(group)


def _resources(part: Part) -> dict[str, float]:
    return {"CPU": part.cores, "GPU": part.gpus} if part.gpus else {"CPU": part.cores}


def machines() -> list[Machine]:
    """Total resources of the cluster's machines."""
    import ray

    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Machine(gpus=int(one.get("GPU", 0)), cores=int(one.get("CPU", 0))) for one in found]


def hold(request: Request, autoscaling: bool) -> None:
    """Ask, say what was granted, and keep it until it is taken away or this process is stopped."""
    import ray

    if not autoscaling:
        refuse_what_never_fits(request, machines(), "the Ray cluster")
    while group_state(request.name) is not None:
        say(f"{request.name} holds pools in Ray already: it ends, or somebody releases it")
        time.sleep(POLL_S)
    with placed(request) as group:
        while not group.wait(POLL_S):
            _check(request)
            free = ray.available_resources()
            now = f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} cores"
            say(f"it waits in Ray's queue: the cluster has {now} free now")
        anchors = [_anchor(request, group, bundle) for bundle in range(len(request.parts))]
        grant = Grant(
            allocation=request.name, parts=tuple(_granted(anchor, bundle) for bundle, anchor in enumerate(anchors))
        )
        print(GRANTED + grant.model_dump_json(), flush=True)
        while True:
            time.sleep(POLL_S)
            _check(request)


def _check(request: Request) -> None:
    if group_state(request.name) is None:
        raise Refusal(f"the placement group {request.name} was taken away from this run")


def _anchor(request: Request, group: object, bundle: int) -> Any:
    name = anchor_name(request.name, bundle)
    options = {"num_gpus": request.parts[bundle].gpus, "name": name, "max_restarts": -1}
    return on_bundle(Anchor, group, bundle, **options).remote()


def _granted(anchor: Any, bundle: int) -> GrantedPart:
    import ray

    machine, visible = ray.get([anchor.machine.remote(), anchor.visible.remote()], timeout=STARTED_S)
    gpus = tuple(gpu for gpu in visible.split(",") if gpu)
    return GrantedPart(machine=machine, gpus=gpus, place=("--bundle", str(bundle)))


def group_state(name: str) -> str | None:
    """Ray's state of a placement group that is not removed."""
    from ray.util import placement_group_table

    states = [one["state"] for one in placement_group_table().values() if one["name"] == name]
    return next((state for state in states if state != "REMOVED"), None)


def withdraw(name: str) -> None:
    """Remove the placement group of that name, if there is one."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    deadline = time.monotonic() + REMOVED_S
    while group_state(name) is not None:
        remove_placement_group(get_placement_group(name))
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray did not remove {name} within {REMOVED_S:g} s")
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--autoscaling", action="store_true")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--request", type=Request.model_validate_json)
    task.add_argument("--withdraw")
    options = parser.parse_args()
    connect(options.address)
    if options.withdraw:
        withdraw(options.withdraw)
    else:
        hold(options.request, options.autoscaling)


if __name__ == "__main__":
    run_main(main)
