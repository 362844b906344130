"""The way into a Ray cluster."""

import logging
import signal
import sys
from typing import Any

from infra.pools import ray_remote
from infra.refusal import Refusal

NAMESPACE = "draftsmith"
STARTED_S = 300.0
"""Timeout for a process on a part's machine: Ray may be busy, or a bundle may move."""


def connect(address: str) -> None:
    """Make this process a driver: what it makes in the cluster ends with it. Raises Refusal where no cluster is."""
    import ray
    from ray import cloudpickle

    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise Refusal(
            f"pools.ray.address={address}: no Ray cluster answers ({error}): start one (`ray start --head`) whose "
            "machine this is too, or name its head"
        ) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # By value: the cluster's workers need nothing of ours to be importable.
    cloudpickle.register_pickle_by_value(ray_remote)


def on_bundle(remote: type, group: object, bundle: int, **options: Any) -> Any:
    """A maker of actors of class `remote` in a bundle; without options they take nothing of it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)  # pyright: ignore[reportArgumentType]
    return ray.remote(remote).options(**{"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": place, **options})


def anchor_name(group: str, bundle: int) -> str:
    """Name of the actor that holds a bundle's GPUs."""
    return f"{group}-{bundle}"
