"""The contract of engines that have a queue of their own: requests, grants, and the processes that talk to the engine.

These run on the flow's machine, under supervisors, one per lease and one per command: `python -m MODULE POOLS TASK ...`
with the recipe's pools as JSON, where TASK is `hold REQUEST`, `drive ALLOCATION PLACE COMMAND...` or `withdraw NAME`.
"""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from operator import mul

from infra.config import PoolsConfig
from infra.pools.base import Role
from infra.records.data_path import Record
from infra.refusal import Refusal

PREFIX = "draftsmith-"
GRANTED = "granted "
POLL_S = 1.0
GRACE_S = 10.0
"""Grace period of a command on the pool's machine."""
GONE_S = 60.0
MANY_STATES = 100_000
"""A search for a place takes seconds then, and is given up: what it could not refuse waits in the engine's queue."""

Size = tuple[int, int]
"""GPUs and cores."""


class Part(Record):
    """Devices of one machine, for one of the commands that share a pool."""

    role: Role
    gpus: int
    cores: int


class Request(Record):
    """All the parts of an owner's pools: granted together or not at all."""

    owner: str
    folder: str
    """The owner's own, on a file system that all machines share."""
    pools: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all pools."""
        return tuple(part for parts in self.pools for part in parts)

    @property
    def name(self) -> str:
        """What the engine knows it by."""
        return PREFIX + self.owner


class GrantedPart(Record):
    """The place of a part."""

    machine: str
    gpus: tuple[str, ...]
    """Names of its GPUs on that machine."""
    place: tuple[str, ...]
    """What `Engine.drive` is told of it."""


class Grant(Record):
    """What the engine gave, in the order of the request's parts."""

    allocation: str
    """The engine's name of it."""
    parts: tuple[GrantedPart, ...]


class Machine(Record):
    """Total resources of a machine of the cluster."""

    gpus: int
    cores: int


@cache
def say(why: str) -> None:
    """Print what a holder waits for; the same text once."""
    print(why, flush=True)


class Engine(ABC):
    """What differs from engine to engine."""

    def __init__(self, config: PoolsConfig) -> None:
        self.config = config

    @abstractmethod
    def hold(self, request: Request) -> None:
        """Ask for the parts, print why it waits, then what was granted; hold it until SIGTERM.

        Raises Refusal for what can never fit, and for what was taken away.
        """

    @abstractmethod
    def drive(self, allocation: str, place: Sequence[str], command: Sequence[str]) -> int:
        """Run a command on a part, print what it prints, and return its status.

        SIGTERM, or this process's death, stops the command and all that it started within GRACE_S.
        """

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether the engine has anything under a name, asked for or granted."""

    @abstractmethod
    def cancel(self, name: str) -> None:
        """Begin to take it away."""

    def withdraw(self, name: str) -> None:
        """Cancel what is under a name, and wait until it is gone. Raises TimeoutError."""
        deadline = time.monotonic() + GONE_S
        while self.holds(name):
            self.cancel(name)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} was not cancelled within {GONE_S:g} s")
            time.sleep(POLL_S / 2)

    def wait_for_name(self, name: str) -> None:
        """Wait until nobody holds pools under a name."""
        while self.holds(name):
            say(f"{name} holds pools already: it ends, or somebody releases it")
            time.sleep(POLL_S)


def run_task(engine: type[Engine]) -> None:
    """Do what this process's arguments say."""
    config, task, *arguments = sys.argv[1:]
    chosen = engine(PoolsConfig.model_validate_json(config))
    if task == "hold":
        chosen.hold(Request.model_validate_json(arguments[0]))
    elif task == "withdraw":
        chosen.withdraw(arguments[0])
    else:
        allocation, place, *command = arguments
        raise SystemExit(chosen.drive(allocation, json.loads(place), command))


def refuse_what_never_fits(request: Request, machines: Sequence[Machine], where: str) -> None:
    """Raise Refusal, with the numbers, if the request exceeds the empty cluster."""
    gpus, cores = sum(part.gpus for part in request.parts), sum(part.cores for part in request.parts)
    has = (
        f"{where} has {len(machines)} machines with {sum(one.gpus for one in machines)} GPUs and "
        f"{sum(one.cores for one in machines)} cores in all, at most {max((one.gpus for one in machines), default=0)} "
        f"GPUs and {max((one.cores for one in machines), default=0)} cores in one"
    )
    for part in request.parts:
        if not fit([part], machines):
            wants = f"{part.gpus} GPUs and {part.cores} cores" if part.gpus else f"{part.cores} cores"
            raise Refusal(
                f"the {part.role} pool wants {wants} on one machine, and none has as much: {has}; lower "
                f"pools.{part.role}_gpus, pools.cores_per_gpu or pools.cores, or raise generator.count"
            )
    if not fit(request.parts, machines):
        raise Refusal(
            f"the pools want {gpus} GPUs and {cores} cores in {len(request.parts)} parts, each on one machine, and "
            f"they can never fit together: {has}; lower pools.inference_gpus, pools.training_gpus, "
            "pools.cores_per_gpu or pools.cores"
        )


def fit(parts: Sequence[Part], machines: Sequence[Machine]) -> bool:
    """Whether the parts fit into the empty cluster. True, too, where that would take long to find out."""
    wanted = sorted(((part.gpus, part.cores) for part in parts), reverse=True)
    there_are = sorted(((one.gpus, one.cores) for one in machines), reverse=True)
    return _fit_in_order(wanted, there_are) or _fit_in_any_order(wanted, there_are)


def _fit_in_order(parts: Sequence[Size], machines: Sequence[Size]) -> bool:
    """Whether the parts fit when each in turn goes to the fullest machine that has room for it."""
    free = list(machines)
    for gpus, cores in parts:
        machine = min((one for one in free if one[0] >= gpus and one[1] >= cores), default=None)
        if machine is None:
            return False
        free.remove(machine)
        free.append((machine[0] - gpus, machine[1] - cores))
    return True


def _fit_in_any_order(parts: Sequence[Size], machines: Sequence[Size]) -> bool:
    """Whether any placement of the parts fits; True if there are too many to try."""
    counts = Counter(parts)
    sizes = list(counts)
    # Equal parts are alike: a state is the number of parts of each size that are left.
    left, tried = {tuple(counts.values())}, 0
    for index, (gpus, cores) in enumerate(machines):
        room = [sum(column) for column in zip(*machines[index:], strict=True)]
        best = dict[tuple[int, ...], int]()
        for state in left:
            if sum(map(mul, state, (size[0] for size in sizes))) > room[0]:
                continue
            if sum(map(mul, state, (size[1] for size in sizes))) > room[1]:
                continue
            for *others, last in _fill(gpus, cores, sizes, state):
                best[tuple(others)] = min(last, best.get(tuple(others), last))
        # Of states that differ in the last number only, the smallest leads wherever the others do.
        left = {(*others, last) for others, last in best.items()}
        tried += len(left)
        if tried > MANY_STATES:
            return True
    return (0,) * len(sizes) in left


def _fill(gpus: int, cores: int, sizes: Sequence[Size], counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each number of parts that a machine may leave: of the last size, the smallest, it takes all that still fit."""
    if not sizes:
        yield ()
        return
    (each_gpus, each_cores), count = sizes[0], counts[0]
    most = min(count, cores // each_cores, gpus // each_gpus if each_gpus else count)
    for taken in range(0 if sizes[1:] else most, most + 1):
        for rest in _fill(gpus - taken * each_gpus, cores - taken * each_cores, sizes[1:], counts[1:]):
            yield (count - taken, *rest)
