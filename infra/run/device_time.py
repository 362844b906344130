"""How long a run held GPUs, by role, how busy they were, and what that cost.

`devices.jsonl` has a line whenever a lease begins or ends: who holds how many GPUs of which role from then on. A run
that is killed ends no lease; when it is resumed, its last sign of life ends it.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from infra.files.lines import as_line, read_objects, write_objects
from infra.files.run_folder import RunFolder
from infra.run.gpu_use import gpu_use

HOUR_S = 3600.0


@dataclass(frozen=True)
class DeviceTime:
    """GPU-hours of a run by role."""

    hours: Mapping[str, float]
    price_per_hour: float | None = None
    """Of one GPU, in dollars, if the recipe states it."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """The share of time in which a kernel ran on the GPUs of a role, where it was measured (see `gpu_use`)."""

    @property
    def total(self) -> float:
        return sum(self.hours.values())

    @property
    def cost(self) -> float | None:
        """In dollars; None without a price."""
        return None if self.price_per_hour is None else self.total * self.price_per_hour

    def in_words(self, gain: float | None = None) -> str:
        """`3.20 GPU-hours (inference 1.10, 64% busy; training 2.10), $9.60`; empty for a run that held no GPU.

        `gain`: the relative gain over what the gate compared it with; what one per cent of it cost is told too.
        """
        if not self.total:
            return ""
        parts = ("; " if self.busy else ", ").join(
            f"{role} {hours:.2f}{self._how_busy(role)}" for role, hours in sorted(self.hours.items())
        )
        cost = "" if self.cost is None else f", ${self.cost:,.2f}"
        each = f", ${self.cost / (100 * gain):,.2f} for each per cent of the gain" if self.cost and gain else ""
        return f"{self.total:.2f} GPU-hours ({parts}){cost}{each if gain and gain > 0 else ''}"

    @property
    def mean_busy(self) -> float | None:
        """Over all roles whose use was measured; None without one."""
        measured = {role: hours for role, hours in self.hours.items() if role in self.busy}
        hours = sum(measured.values())
        return sum(self.busy[role] * of for role, of in measured.items()) / hours if hours else None

    def _how_busy(self, role: str) -> str:
        return f", {self.busy[role]:.0%} busy" if role in self.busy else ""


@contextmanager
def holding(folder: RunFolder, gpus: Mapping[str, int]) -> Iterator[None]:
    """Record how many GPUs of each role the run holds until the block ends."""
    note(folder, folder.name, gpus)
    try:
        yield
    finally:
        note(folder, folder.name, {})


def note(folder: RunFolder, owner: str, gpus: Mapping[str, int]) -> None:
    """Record what `owner`, the run or one of its generators, holds from now on."""
    with folder.devices.open("a") as file:
        file.write(as_line({"at": time.time(), "owner": owner, "gpus": dict(gpus)}))


def end_leases(folder: RunFolder) -> None:
    """End the leases of a run that was killed when it last showed a sign of life. For its next owner, at the start."""
    lines = read_objects(folder.devices)
    held = {line["owner"]: line["gpus"] for line in lines}
    if not any(held.values()):
        return
    signs = [file.stat().st_mtime for file in (*folder.logs.glob("*"), folder.metrics) if file.is_file()]
    at = max([line["at"] for line in lines] + signs)
    write_objects(folder.devices, lines + [{"at": at, "owner": owner, "gpus": {}} for owner in held if held[owner]])


def device_time(folder: RunFolder, price_per_hour: float | None = None, now: float | None = None) -> DeviceTime:
    """What a run has held until `now`, from its `devices.jsonl`, and how busy that was."""
    hours: dict[str, float] = defaultdict(float)
    open_since: dict[str, tuple[float, Mapping[str, int]]] = {}
    ends = [{"at": time.time() if now is None else now, "owner": None, "gpus": {}}]
    for line in [*read_objects(folder.devices), *ends]:
        # The last line ends every lease that still runs.
        for owner in [line["owner"]] if line["owner"] else list(open_since):
            since, gpus = open_since.pop(owner, (line["at"], {}))
            for role, count in gpus.items():
                hours[role] += count * max(0.0, line["at"] - since) / HOUR_S
        open_since[line["owner"]] = (line["at"], line["gpus"])
    held = {role: time_held for role, time_held in hours.items() if time_held}
    return DeviceTime(held, price_per_hour, gpu_use(folder))
