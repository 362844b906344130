"""Pools of an engine with a queue of its own: Ray's or Slurm's.

A supervised process on this machine, the holder, asks the engine and keeps what it grants for as long as it lives. A
command on a pool is a supervised process on this machine too: it drives the one on the pool's machine. So whatever ends
the flow ends both, and they end what they drive.
"""

import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from infra.config import PoolsConfig
from infra.pools.base import LocalCommand, Pool, PoolBusyError, PoolSpec, ReleaseError, in_words
from infra.pools.engine import GRACE_S, GRANTED, PREFIX, Grant, Part, Request
from infra.processes.exit import REFUSED
from infra.processes.process import Owner, Process, module, start

HOLDER = "pools-"
"""Before the owner's name it is the role of the holder, whose log is `pools-OWNER.log`."""
LOOK_S = 20.0
POLL_S = 0.1
STOP_S = GRACE_S + 20.0
"""Grace period of the local process that drives a command and waits for it."""
WITHDRAW_S = 120.0
HOLDER_STOP_S = 60.0
"""Grace period of the holder, which withdraws what it holds: longer than Slurm's commands take to be killed."""


def divide(specs: Sequence[PoolSpec], config: PoolsConfig) -> tuple[tuple[Part, ...], ...]:
    """The parts of each pool, with its GPUs divided evenly. With fewer GPUs than parts, parts share one."""
    pools = []
    for spec in specs:
        count = min(spec.parts, spec.gpus) or spec.parts
        shares = [len(range(index, spec.gpus, count)) for index in range(count)]
        pools.append(
            tuple(Part(role=spec.role, gpus=n, cores=n * config.cores_per_gpu or config.cores) for n in shares)
        )
    return tuple(pools)


def engine_task(config: PoolsConfig, *task: str) -> list[str]:
    """The command line of a process that talks to the recipe's engine. The flow itself never imports Ray: its driver
    would take over the flow's signals.
    """
    return module(f"infra.pools.{config.kind}_engine", config.model_dump_json(), *task)


class QueuedPool(Pool):
    """Devices of one or several machines, one part for each of the commands that share it."""

    def __init__(self, config: PoolsConfig, owner: Owner, grant: Grant, first: int, parts: Sequence[Part]) -> None:
        """`first`: index of its first part in the grant. GPUs are named with their machines."""
        self._granted = grant.parts[first : first + len(parts)]
        super().__init__(owner, tuple(f"{part.machine}:{gpu}" for part in self._granted for gpu in part.gpus))
        self._config, self._allocation, self._parts = config, grant.allocation, parts

    def _place(self, command: Sequence[str], processes: int, index: int | None) -> LocalCommand:
        """On a part of the pool, the first one where no `index` is given."""
        part = (index or 0) % len(self._parts)
        sharing = processes if index is None else -(-processes // len(self._parts))
        place = json.dumps(self._granted[part].place)
        driving = engine_task(self._config, "drive", self._allocation, place, *command)
        # The engine sets which GPUs the command sees; what this process sees means nothing there.
        return LocalCommand(driving, max(1, self._parts[part].cores // sharing), grace_s=STOP_S)


@dataclass
class _Asked:
    """A request on its way, or granted."""

    specs: tuple[PoolSpec, ...]
    holder: Process
    waits: str = "it has not answered yet"
    pools: tuple[QueuedPool, ...] = ()


class QueuedPools:
    """Leases devices from an engine that admits."""

    def __init__(self, config: PoolsConfig, look_s: float = LOOK_S) -> None:
        self._config, self.look_s = config, look_s
        self._asked: dict[str, _Asked] = {}
        self._refused: set[str] = set()
        """Owners whose last request was refused: they hold nothing, and the engine may not answer at all."""
        self._left: set[str] = set()
        """Owners whose last release failed: they may hold something, whatever is refused since."""

    def acquire(self, specs: Sequence[PoolSpec], owner: Owner) -> tuple[QueuedPool, ...]:
        """Request devices, or keep waiting for them. Raises Refusal or PoolBusyError, as the contract says."""
        divided = divide(specs, self._config)
        asked = self._asked.get(owner.name)
        self._refused.discard(owner.name)
        if asked is None:
            request = Request(owner=owner.name, folder=str(owner.logs.absolute()), pools=divided)
            holding = engine_task(self._config, "hold", request.model_dump_json())
            holder = start(HOLDER + owner.name, holding, owner, grace_s=HOLDER_STOP_S)
            asked = self._asked[owner.name] = _Asked(tuple(specs), holder)
        assert asked.specs == tuple(specs), f"{owner.name} asked for something else before"
        assert not asked.pools, f"{owner.name} already holds pools"
        grant = self._wait(asked, owner.name)
        first = 0
        for parts in divided:
            asked.pools += (QueuedPool(self._config, owner, grant, first, parts),)
            first += len(parts)
        return asked.pools

    def _wait(self, asked: _Asked, owner: str) -> Grant:
        deadline = time.monotonic() + self.look_s
        while time.monotonic() < deadline:
            ended = asked.holder.poll() is not None
            for line in asked.holder.new_lines():
                if line.startswith(GRANTED):
                    return Grant.model_validate_json(line.removeprefix(GRANTED))
                asked.waits = line
            if ended:
                del self._asked[owner]
                if asked.holder.poll() == REFUSED and owner not in self._left:
                    self._refused.add(owner)
                asked.holder.check()
                raise PoolBusyError(f"the request was taken away: {asked.waits}")
            time.sleep(POLL_S)
        raise PoolBusyError(f"{in_words(asked.specs)}; {asked.waits}")

    def release(self, owner: str) -> None:
        """Stop the owner's commands, wherever they run, and give its devices back; take its request out of the queue.

        What another process of that owner holds is taken away too. Raises ReleaseError where the engine does not
        answer.
        """
        asked = self._asked.pop(owner, None)
        with ExitStack() as stack:
            if asked:
                stack.callback(asked.holder.stop)
                for pool in asked.pools:
                    stack.callback(pool.stop)
        if owner not in self._refused and (asked is None or asked.holder.poll()):
            self._left.add(owner)
            self._withdraw(owner)
            self._left.remove(owner)

    def _withdraw(self, owner: str) -> None:
        command = engine_task(self._config, "withdraw", PREFIX + owner)
        by_itself = "; the job ends by itself within six minutes" if self._config.kind == "slurm" else ""
        try:
            done = subprocess.run(command, check=False, timeout=WITHDRAW_S, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired as error:
            raise ReleaseError(f"no answer within {WITHDRAW_S:g} s{by_itself}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ReleaseError(last.removeprefix("error: ") + by_itself)
