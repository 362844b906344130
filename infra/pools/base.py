"""The contract of pools: GPUs leased for one role, on which commands are started."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from infra.processes.process import Owner, Process

Role = Literal["inference", "training"]


class PoolBusyError(Exception):
    """The GPUs exist, but others hold them now."""


@dataclass(frozen=True)
class PoolSpec:
    """What is wanted."""

    role: Role
    gpus: int
    """0 runs on the CPU."""
    parts: int = 1
    """Commands that share the GPUs: each runs on one machine, and different ones may run on different machines."""


class Pool(Protocol):
    """A lease on devices."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the leased GPUs (on this machine their UUIDs); empty on the CPU."""
        ...

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
        ...


class PoolProvider(Protocol):
    """A source of devices to lease."""

    @property
    def look_s(self) -> float:
        """Seconds that one `acquire` may wait before it says that the devices are busy."""
        ...

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


def cpu_threads(count: int) -> dict[str, str]:
    """The environment of a process with this number of CPU threads.

    OpenMP's threads spin while they wait for each other. Where another program takes one's core, that costs ten times
    the time and more; threads that sleep cost small matrices up to 1.6 times, and large ones nothing.
    """
    return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
