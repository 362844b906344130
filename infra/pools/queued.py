"""Pools of an engine with a queue of its own: what Ray and Slurm have in common.

A supervised process on this machine, the holder, asks the engine and keeps what it grants for as long as it lives. A
command on a pool is a supervised process on this machine too: it drives the one on the pool's machine. So whatever ends
the flow ends both, and they end what they drive.
"""

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from infra.config import PoolsConfig
from infra.pools.base import PoolBusyError, PoolSpec, cpu_threads
from infra.pools.requests import Grant, Part, Request, divide
from infra.processes.process import Owner, Process, start

HOLDER = "pools-"
"""Before the owner's name it is the role of the holder, whose log is `pools-OWNER.log`."""
GRANTED = "granted "
LOOK_S = 20.0
POLL_S = 0.1
GRACE_S = 10.0
"""Grace period of a command on the pool's machine."""
STOP_S = GRACE_S + 20.0
"""Grace period of the local process that drives it and waits for it."""
WITHDRAW_S = 120.0


@cache
def say(why: str) -> None:
    """What a holder waits for: printed once."""
    print(why, flush=True)


class QueueingSystem(Protocol):
    """What differs from engine to engine: three command lines."""

    def holder(self, request: Request) -> list[str]:
        """A process that asks for the parts, prints why it waits, and then GRANTED with the Grant as JSON.

        It holds them until SIGTERM, and ends with REFUSED and a message where they can never fit.
        """
        ...

    def command(self, grant: Grant, part: int, command: Sequence[str]) -> list[str]:
        """A process that runs a command on a part, prints what it prints, and ends with its status.

        SIGTERM, or its death, stops the command and all that it started within GRACE_S.
        """
        ...

    def withdrawal(self, owner: str) -> list[str]:
        """A process that cancels everything under the owner's name."""
        ...


@dataclass
class QueuedPool:
    """Devices of one or several machines, one part for each of the commands that share it."""

    engine: QueueingSystem
    owner: Owner
    grant: Grant
    first: int
    """Index of its first part in the grant."""
    parts: tuple[Part, ...]
    started: list[Process] = field(default_factory=list)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the leased GPUs, with their machines'."""
        mine = self.grant.parts[self.first : self.first + len(self.parts)]
        return tuple(f"{part.machine}:{gpu}" for part in mine for gpu in part.gpus)

    def launch(
        self,
        role: str,
        command: Sequence[str],
        *,
        threads: int | None = None,
        processes: int = 1,
        index: int | None = None,
    ) -> Process:
        """Start a command on a part of the pool: on the first one where no `index` is given."""
        part = (index or 0) % len(self.parts)
        sharing = processes if index is None else -(-processes // len(self.parts))
        # The engine sets what the command sees; what this process sees means nothing there.
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        environment |= cpu_threads(threads or max(1, self.parts[part].cores // sharing))
        driving = self.engine.command(self.grant, self.first + part, command)
        process = start(role, driving, self.owner, environment, STOP_S)
        self.started.append(process)
        return process


@dataclass
class _Asked:
    """A request on its way, or granted."""

    specs: tuple[PoolSpec, ...]
    holder: Process
    waits: str = "it has not answered yet"
    pools: tuple[QueuedPool, ...] = ()


class QueuedPools:
    """Leases devices from an engine that admits."""

    def __init__(self, engine: QueueingSystem, config: PoolsConfig, look_s: float = LOOK_S) -> None:
        self._engine, self._config, self.look_s = engine, config, look_s
        self._asked: dict[str, _Asked] = {}

    def acquire(self, specs: Sequence[PoolSpec], owner: Owner) -> tuple[QueuedPool, ...]:
        """Request devices, or keep waiting for them. Raises Refusal or PoolBusyError, as the contract says."""
        divided = divide(specs, self._config)
        asked = self._asked.get(owner.name)
        if asked is None:
            request = Request(owner=owner.name, folder=str(owner.logs.absolute()), pools=divided)
            holder = start(HOLDER + owner.name, self._engine.holder(request), owner, grace_s=STOP_S)
            asked = self._asked[owner.name] = _Asked(tuple(specs), holder)
        assert asked.specs == tuple(specs), f"{owner.name} asked for something else before"
        assert not asked.pools, f"{owner.name} already holds pools"
        grant = self._wait(asked, owner.name)
        first = 0
        for parts in divided:
            asked.pools += (QueuedPool(self._engine, owner, grant, first, parts),)
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
                asked.holder.check()
                raise PoolBusyError(f"the request was taken away: {asked.waits}")
            time.sleep(POLL_S)
        wanted = " and ".join(f"the {spec.role} pool wants {spec.gpus} GPUs" for spec in asked.specs)
        raise PoolBusyError(f"{wanted}; {asked.waits}")

    def release(self, owner: str) -> None:
        """Stop the owner's commands, wherever they run, and give its devices back; take its request out of the queue.

        What another process of that owner holds is taken away too. Raises subprocess.SubprocessError where the engine
        does not answer.
        """
        asked = self._asked.pop(owner, None)
        if asked is None:
            self._withdraw(owner)
            return
        with ExitStack() as stack:
            stack.callback(asked.holder.stop)
            for pool in asked.pools:
                for process in pool.started:
                    stack.callback(process.stop)
        if asked.holder.poll():
            self._withdraw(owner)

    def _withdraw(self, owner: str) -> None:
        subprocess.run(self._engine.withdrawal(owner), check=True, timeout=WITHDRAW_S)
