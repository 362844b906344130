"""The contract of pools: GPUs leased for one role, on which commands are started."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, Protocol

from infra.processes.process import Owner, Process, start

Role = Literal["inference", "training"]


class PoolBusyError(Exception):
    """The GPUs exist, but others hold them now."""


class ReleaseError(Exception):
    """The engine did not take devices back; the message says why, and when they become free."""


@dataclass(frozen=True)
class PoolSpec:
    """What is wanted."""

    role: Role
    gpus: int
    """0 runs on the CPU."""
    parts: int = 1
    """Commands that share the GPUs: each runs on one machine, and different ones may run on different machines."""


def in_words(specs: Sequence[PoolSpec]) -> str:
    """What is wanted, for messages."""
    return " and ".join(f"the {spec.role} pool wants {spec.gpus} GPUs" for spec in specs)


@dataclass(frozen=True)
class LocalCommand:
    """The process of this machine that is, or drives, a command on a pool."""

    command: Sequence[str]
    threads: int
    """Share of the cores of each of its processes."""
    gpus: Sequence[str] = ()
    """What CUDA sees in it."""
    grace_s: float = 10.0


class Pool(ABC):
    """A lease on devices."""

    def __init__(self, owner: Owner, gpus: tuple[str, ...] = ()) -> None:
        """`gpus`: names of the leased GPUs (on this machine their UUIDs); empty on the CPU."""
        self.owner, self.gpus = owner, gpus
        self._started: list[Process] = []

    def launch(
        self,
        role: str,
        command: Sequence[str],
        *,
        threads: int | None = None,
        processes: int = 1,
        index: int | None = None,
    ) -> Process:
        """Start a command on the pool's devices.

        `processes`: among how many processes the pool is shared; `index`: which of them this one is, or None where the
        command starts them all itself, as the trainer does. `threads`: CPU threads per process; default: its share of
        the cores.
        """
        local = self._place(command, processes, index)
        environment = {
            "CUDA_VISIBLE_DEVICES": ",".join(local.gpus),
            "OMP_NUM_THREADS": str(threads or local.threads),
            # OpenMP's threads spin while they wait for each other. Where another program takes one's core, that costs
            # ten times the time and more; threads that sleep cost small matrices up to 1.6 times, large ones nothing.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        process = start(role, local.command, self.owner, environment, local.grace_s)
        self._started.append(process)
        return process

    @abstractmethod
    def _place(self, command: Sequence[str], processes: int, index: int | None) -> LocalCommand: ...

    def stop(self) -> None:
        """Stop everything that was started on it."""
        with ExitStack() as stack:
            for process in self._started:
                stack.callback(process.stop)


class PoolProvider(Protocol):
    """A source of devices to lease."""

    look_s: float
    """Seconds that one `acquire` may wait before it says that the devices are busy."""

    def acquire(self, specs: Sequence[PoolSpec], owner: Owner) -> Sequence[Pool]:
        """Lease a pool per spec in the owner's name, all of them or none.

        Raises Refusal, with the numbers, for what can never fit, and PoolBusyError for what does not fit now. An
        engine with a queue of its own leaves the request in it: ask again for the same, or release.
        """
        ...

    def release(self, owner: str) -> None:
        """Stop everything the owner started and give its devices back. Releasing twice is fine.

        Engines with a queue know the owner by name: any process may release what a dead one left.
        """
        ...
