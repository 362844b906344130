"""Requests to systems with their own queue, and their grants, exchanged between the flow and its holder."""

from collections.abc import Sequence
from functools import cache

from infra.config import PoolsConfig
from infra.pools.base import PoolSpec, Role
from infra.records.data_path import Record
from infra.refusal import Refusal

PREFIX = "draftsmith-"


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
    """What a command that is to run there is told."""


class Grant(Record):
    """What the engine gave, in the order of the request's parts."""

    allocation: str
    """The engine's name of it."""
    parts: tuple[GrantedPart, ...]


class Machine(Record):
    """Total resources of a machine of the cluster."""

    gpus: int
    cores: int


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


def refuse_what_never_fits(request: Request, machines: Sequence[Machine], where: str) -> None:
    """Raise Refusal, with the numbers, if the request exceeds the empty cluster."""
    gpus, cores = sum(part.gpus for part in request.parts), sum(part.cores for part in request.parts)
    has = f"{where} has {len(machines)} machines with {_in_all(machines)}"
    for part in request.parts:
        if not any(_room(machine, part) for machine in machines):
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
    """Whether the parts fit into the empty cluster."""
    largest_first = sorted(((part.gpus, part.cores) for part in parts), reverse=True)
    return _fits(tuple(largest_first), tuple(sorted((one.gpus, one.cores) for one in machines)))


def _room(machine: Machine, part: Part) -> bool:
    return machine.gpus >= part.gpus and machine.cores >= part.cores


def _in_all(machines: Sequence[Machine]) -> str:
    most = max((one.gpus for one in machines), default=0)
    in_all = f"{sum(one.gpus for one in machines)} GPUs and {sum(one.cores for one in machines)} cores in all"
    return f"{in_all}, at most {most} GPUs and {max((one.cores for one in machines), default=0)} cores in one"


@cache
def _fits(parts: tuple[tuple[int, int], ...], machines: tuple[tuple[int, int], ...]) -> bool:
    """Whether every part finds a place; `machines` is sorted, so that equal states are looked at once."""
    if not parts:
        return True
    (gpus, cores), rest = parts[0], parts[1:]
    for machine in dict.fromkeys(machines):
        if machine[0] >= gpus and machine[1] >= cores:
            left = list(machines)
            left.remove(machine)
            left.append((machine[0] - gpus, machine[1] - cores))
            if _fits(rest, tuple(sorted(left))):
                return True
    return False
