"""The Slurm job that holds a run's pools: its components, its script, and where its parts come to lie.

Components of a heterogeneous job never share a machine. So what fits into one machine is an ordinary job of one
component, and only what does not becomes a component per pool.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from infra.config import SlurmConfig
from infra.pools.engine import GrantedPart, Machine, Part, Request, fit, refuse_what_never_fits
from infra.quantities import numbers
from infra.records.data_path import Record
from infra.refusal import Refusal

TEMPLATE = Path(__file__).with_name("slurm_job.sh.jinja")


def alive_file(request: Request) -> Path:
    """Says that the owner lives, in its folder."""
    return Path(request.folder) / f"{request.name}.alive"


class Component(Record):
    """Parts that Slurm places: on one machine, or each (apart) wherever there is room for it."""

    parts: tuple[Part, ...]
    apart: bool = False


class Node(Record):
    """What a component got of one machine."""

    name: str
    cores: int
    gpus: tuple[str, ...]


def components(request: Request, machines: Sequence[Machine]) -> tuple[Component, ...]:
    """The job's components. Raises Refusal, with the numbers, for what can never fit."""
    refuse_what_never_fits(request, machines, "the Slurm partition")
    gpus, cores = sum(part.gpus for part in request.parts), sum(part.cores for part in request.parts)
    if any(machine.gpus >= gpus and machine.cores >= cores for machine in machines):
        return (Component(parts=request.parts),)
    _refuse_what_shares_a_machine(request, machines)
    return components_apart(request)


def components_apart(request: Request) -> tuple[Component, ...]:
    """A component per pool; on whose machine the job's script runs comes first: its loss ends the job.

    Raises Refusal for a pool that cannot be dealt out evenly.
    """
    for parts in request.pools:
        if len({part.gpus for part in parts}) > 1:
            shares = ", ".join(str(part.gpus) for part in parts)
            raise Refusal(
                f"the {parts[0].role} pool's GPUs would be dealt out as {shares}, and Slurm deals evenly where one "
                f"machine is not enough: make pools.{parts[0].role}_gpus a multiple of generator.count"
            )
    found = (Component(parts=parts, apart=len(parts) > 1) for parts in request.pools)
    return tuple(sorted(found, key=lambda component: component.apart))


def _refuse_what_shares_a_machine(request: Request, machines: Sequence[Machine]) -> None:
    left = sorted(machines, key=lambda one: (one.gpus, one.cores))
    for parts in sorted(request.pools, key=len):
        enough = next((count for count in range(1, len(left) + 1) if fit(parts, left[:count])), None)
        if enough is None:
            raise Refusal(
                f"the {parts[0].role} pool wants {sum(part.gpus for part in parts)} GPUs on machines of its own, as "
                "Slurm gives them to pools that do not fit into one machine together, and the partition has only "
                f"{len(machines)} machines: lower pools.{parts[0].role}_gpus"
            )
        if len(parts) == 1:
            del left[enough - 1]  # the smallest that will do


def script(request: Request, parts: Sequence[Component], config: SlurmConfig) -> str:
    """What is handed to sbatch."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    template = environment.from_string(TEMPLATE.read_text())
    alive = shlex.quote(str(alive_file(request)))
    return template.render(name=request.name, components=parts, config=config, alive=alive)


def number(sbatch: str) -> str:
    """The job's number in the output of `sbatch --parsable`, before which a site's wrapper may print its own lines."""
    return sbatch.strip().splitlines()[-1].partition(";")[0]


def machines(sinfo: str) -> list[Machine]:
    """The machines in the output of `sinfo --Node --format='%N|%c|%G'`."""
    found: dict[str, Machine] = {}
    for line in sinfo.splitlines():
        name, cores, gres = line.split("|")
        counts = re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres.strip())
        found[name.strip()] = Machine(gpus=sum(map(int, counts)), cores=int(cores))
    return list(found.values())


def nodes(job: str) -> list[list[Node]]:
    """The nodes of each component, from `scontrol --details show job`, whose lines for equal nodes are one."""
    found = []
    for component in re.split(r"^(?=JobId=)", job, flags=re.MULTILINE)[1:]:
        mine: list[Node] = []
        for names, cores, gres in re.findall(
            r"^ +Nodes=(\S+) CPU_IDs=(\S+) Mem=\S* GRES=(.*)$", component, re.MULTILINE
        ):
            gpus = re.findall(r"gpu(?::[^:,(]+)?:\d+\(IDX:([\d,-]+)\)", gres)
            shown = tuple(str(index) for text in gpus for index in numbers(text))
            mine += [Node(name=name, cores=len(numbers(cores)), gpus=shown) for name in _names(names)]
        found.append(mine)
    return found


def _names(text: str) -> list[str]:
    """`gpu[01-03],big` -> gpu01, gpu02, gpu03, big."""
    found = []
    for stem, spans, end in re.findall(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*),?", text):
        for part in spans.split(",") if spans else [""]:
            first, _, last = part.partition("-")
            span = range(int(first), int(last or first) + 1) if first else []
            found += [f"{stem}{number:0{len(first)}}{end}" for number in span] or [stem + end]
    return found


def assign(component: Component, got: Sequence[Node], step: Sequence[str]) -> list[GrantedPart]:
    """Each part's machine and GPUs out of what its component got; `step`: options of srun for all its steps.

    A part's place: the positions, from 1, of its GPUs among those of its component on the machine, then srun's options.
    """
    left = {node.name: node.cores for node in got}
    taken = dict.fromkeys(left, 0)
    granted = []
    for part in component.parts:
        node = next(one for one in got if left[one.name] >= part.cores and len(one.gpus) >= taken[one.name] + part.gpus)
        mine = range(taken[node.name], taken[node.name] + part.gpus)
        left[node.name] -= part.cores
        taken[node.name] += part.gpus
        place = [",".join(str(index + 1) for index in mine), *step, f"--nodelist={node.name}"]
        place += [f"--cpus-per-task={node.cores}", f"--gres=gpu:{len(node.gpus)}" if mine else "--gres=none"]
        gpus = tuple(node.gpus[index] for index in mine)
        granted.append(GrantedPart(machine=node.name, gpus=gpus, place=tuple(place)))
    return granted
