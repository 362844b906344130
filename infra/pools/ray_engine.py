"""Pools that a Ray cluster places: a placement group is the gang, its bundles are the parts.

Every process here is a Ray driver: what it makes in the cluster ends with it, and a command's supervisor ends the rest.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group_table
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from infra.network.ports import HOST
from infra.pools.engine import (
    GRACE_S,
    GRANTED,
    POLL_S,
    Engine,
    Grant,
    GrantedPart,
    Machine,
    Part,
    Request,
    refuse_what_never_fits,
    run_task,
    say,
)
from infra.processes.exit import run_main
from infra.processes.process import guard
from infra.refusal import Refusal
from infra.settings import data_plane_environment

NAMESPACE = "draftsmith"
STARTED_S = 300.0
"""Timeout for a process on a part's machine: Ray may be busy, or a bundle may move."""
ANSWER_S = 60.0
"""A machine that is silent for this long is lost, and its command is restarted."""
LISTENS_S = 10.0
"""Timeout for a connection to the head."""
CHUNK = 65536
READ_S = 1.0


class Anchor:
    """Holds the GPUs of a bundle. Ray restarts it when it moves the bundle off a lost machine.

    Ray sends this class and the next by value, as they are of the main module: the cluster's workers import nothing of
    ours. So they use the standard library and Ray only, and what passes are strings, numbers and bytes.
    """

    def machine(self) -> str:
        """A name of this machine."""
        return f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}"

    def visible(self) -> str:
        """The bundle's GPUs, as Ray bound them."""
        return ",".join(str(gpu) for gpu in ray.get_gpu_ids())


class Command:
    """A command under a supervisor, which ends it when this actor ends. Asked by one driver."""

    def __init__(
        self, supervised: Sequence[str], command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> None:
        status, report = os.pipe()
        self._status = status
        # Detached: Ray kills a worker's children before their parent can say a word, and only those.
        self._process = subprocess.Popen(
            [*supervised, "--detached", str(report), "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=folder,
            pass_fds=(report,),
        )
        os.close(report)

    def read(self) -> tuple[bytes, int | None]:
        """What was printed since, waiting for it a little, and the exit status once the command has ended."""
        output = self._process.stdout
        assert output is not None
        readable, _, _ = select.select([output, self._status], [], [], READ_S)
        if output in readable:
            printed = os.read(output.fileno(), CHUNK)
            if printed:
                return printed, None
        if self._status in readable:
            return b"", int(os.read(self._status, CHUNK) or b"137")  # none: the supervisor was killed
        return b"", None

    def stop(self) -> None:
        """Have the supervisor stop the command: its starter is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()


class RayEngine(Engine):
    """Ray admits a placement group when all its bundles fit."""

    def hold(self, request: Request) -> None:
        """Own the placement group, and an anchor in each of its bundles."""
        self._check_address()
        self._connect()
        if not self.config.ray.autoscaling:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            machines = [Machine(gpus=int(one.get("GPU", 0)), cores=int(one.get("CPU", 0))) for one in nodes]
            refuse_what_never_fits(request, machines, "the Ray cluster")
        self.wait_for_name(request.name)
        bundles = [_resources(part) for part in request.parts]
        group = placement_group(bundles, strategy="PACK", name=request.name)
        try:
            while not group.wait(POLL_S):
                self._check(request)
                free = ray.available_resources()
                now = f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} cores"
                say(f"it waits in Ray's queue: the cluster has {now} free now")
            anchors = [_anchor(request, group, bundle) for bundle in range(len(bundles))]  # each lives as long as this
            parts = tuple(_granted(anchor, bundle) for bundle, anchor in enumerate(anchors))
            print(GRANTED + Grant(allocation=request.name, parts=parts).model_dump_json(), flush=True)
            while True:
                time.sleep(POLL_S)
                self._check(request)
        finally:
            remove_placement_group(group)

    def _check_address(self) -> None:
        """Raise Refusal where nobody listens at the address: Ray itself would try for minutes, and then kill us."""
        address = self.config.ray.address
        host, _, port = address.rpartition(":")
        if "://" in host or not port.isdecimal() or host in ("", HOST, "localhost"):  # Ray knows loopback's real one
            return
        try:
            socket.create_connection((host, int(port)), timeout=LISTENS_S).close()
        except OSError as error:
            raise Refusal(
                f"pools.ray.address={address}: nobody answers there ({error}): start a head (`ray start --head`), or "
                "correct the address; is there a firewall?"
            ) from error

    def _connect(self) -> None:
        address = self.config.ray.address
        try:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:  # a RuntimeError: other versions of Ray or Python
            raise Refusal(
                f"pools.ray.address={address}: no Ray cluster takes this machine ({error}): start one (`ray start "
                "--head`) with this version of Ray and Python whose machine this is too, or name its head as HOST:PORT"
            ) from error
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def _check(self, request: Request) -> None:
        if not self.holds(request.name):
            raise Refusal(f"the placement group {request.name} was taken away from this run")

    def drive(self, allocation: str, place: Sequence[str], command: Sequence[str]) -> int:
        """Own the actor that runs the command, on the GPUs that its bundle's anchor holds."""
        try:
            self._connect()
            bundle = int(place[0])
            visible = ray.get(ray.get_actor(_anchor_name(allocation, bundle)).visible.remote(), timeout=STARTED_S)
            environment = {**data_plane_environment(), "CUDA_VISIBLE_DEVICES": visible}
            maker = _on_bundle(Command, get_placement_group(allocation), bundle, max_concurrency=2)
            actor = maker.remote(guard(GRACE_S), command, environment, os.getcwd())
            # Until here SIGTERM just ends this process: nothing of the command is there yet.
            stop = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            return _follow(actor, stop)
        except (RayError, ValueError) as error:
            # Not a refusal: a machine was lost, or the pool; it may come again.
            print(f"error: Ray lost the command: {error}", file=sys.stderr, flush=True)
            return 1

    def withdraw(self, name: str) -> None:
        """Remove the placement group of that name, if there is one, and with it all that runs in it."""
        self._check_address()
        self._connect()
        super().withdraw(name)

    def holds(self, name: str) -> bool:
        """Whether a placement group of that name is not removed."""
        return any(one["name"] == name and one["state"] != "REMOVED" for one in placement_group_table().values())

    def cancel(self, name: str) -> None:
        """Remove the placement group."""
        remove_placement_group(get_placement_group(name))


def _resources(part: Part) -> dict[str, float]:
    return {"CPU": part.cores, "GPU": part.gpus} if part.gpus else {"CPU": part.cores}


def _on_bundle(remote: type, group: object, bundle: int, **options: Any) -> Any:
    """A maker of actors of class `remote` in a bundle; without options they take nothing of it."""
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)  # pyright: ignore[reportArgumentType]
    return ray.remote(remote).options(**{"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": place, **options})


def _anchor_name(group: str, bundle: int) -> str:
    return f"{group}-{bundle}"


def _anchor(request: Request, group: object, bundle: int) -> Any:
    name, gpus = _anchor_name(request.name, bundle), request.parts[bundle].gpus
    return _on_bundle(Anchor, group, bundle, num_gpus=gpus, name=name, max_restarts=-1).remote()


def _granted(anchor: Any, bundle: int) -> GrantedPart:
    machine, visible = ray.get([anchor.machine.remote(), anchor.visible.remote()], timeout=STARTED_S)
    return GrantedPart(machine=machine, gpus=tuple(gpu for gpu in visible.split(",") if gpu), place=(str(bundle),))


def _follow(actor: Any, stop: threading.Event) -> int:
    """Print what the command prints until it has ended; return its status."""
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


if __name__ == "__main__":
    run_main(lambda: run_task(RayEngine))
