"""Runs a command in a bundle of a placement group and drives it from here. One process per command.

`python -m infra.pools.ray_command --address A --group NAME --bundle I --grace S -- COMMAND` prints what the command
prints and ends with its status. SIGTERM has it stopped; when this process dies, Ray ends the actor, and the command's
supervisor the rest.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from infra.pools.ray_cluster import STARTED_S, anchor_name, connect, on_bundle
from infra.pools.ray_remote import Command
from infra.processes import supervisor
from infra.processes.exit import run_main
from infra.settings import data_plane_environment

ANSWER_S = 60.0
"""A machine that is silent for this long is lost, and its command is restarted."""


def place(options: argparse.Namespace) -> Any:
    """The actor that runs the command, on the GPUs that its bundle's anchor holds."""
    import ray
    from ray.util.placement_group import get_placement_group

    group = get_placement_group(options.group)
    anchor = ray.get_actor(anchor_name(options.group, options.bundle))
    visible = ray.get(anchor.visible.remote(), timeout=STARTED_S)
    guard = [sys.executable, "-I", "-S", str(Path(supervisor.__file__)), "--grace", str(options.grace)]
    environment = {**data_plane_environment(), "CUDA_VISIBLE_DEVICES": visible}
    maker = on_bundle(Command, group, options.bundle, max_concurrency=2)
    return maker.remote(guard, options.command, environment, os.getcwd())


def follow(actor: Any, stop: threading.Event) -> int:
    """Print what the command prints until it has ended; return its status."""
    import ray

    status, told, wait_s = None, False, STARTED_S
    while status is None:
        if stop.is_set() and not told:
            actor.stop.remote()
            told = True
        printed, status = ray.get(actor.read.remote(), timeout=wait_s)
        wait_s = ANSWER_S
        sys.stdout.buffer.write(printed)
        sys.stdout.buffer.flush()
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--bundle", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    from ray.exceptions import RayError

    try:
        connect(options.address)
        actor = place(options)
        # Until here SIGTERM just ends this process: nothing of the command is there yet.
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        status = follow(actor, stop)
    except (RayError, ValueError) as error:
        # Not a refusal: a machine was lost, or the pool; it may come again.
        print(f"error: Ray lost the command: {error}", file=sys.stderr, flush=True)
        status = 1
    raise SystemExit(status)


if __name__ == "__main__":
    run_main(main)
