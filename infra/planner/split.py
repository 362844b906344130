"""How GPUs are best divided between inference and training: predicted before a run, corrected by its measured rates."""

from infra.quantities import plural
from infra.records.data_path import Record, SideRates

WORTH_SAYING = 0.02
"""A split that gains less is not recommended over the present one."""


class Sides(Record):
    """What one generator and one rank do by themselves, in samples per second."""

    per_generator: float
    per_rank: float
    """Samples per second of a rank that never waits for a sample."""
    samples_per_step: int
    devices_per_generator: int = 1
    devices_per_rank: int = 1
    context: int = 1
    """Ranks that share every sample; together they are one rank here."""
    transport: float | None = None
    """Samples per second of the link between both sides; None if it is never the limit."""


class Split(Record):
    """One division of the devices, and samples per second of each side."""

    inference_devices: int
    training_devices: int
    inference: float
    training: float
    transport: float | None = None
    together: bool = False
    """Whether both sides have the same devices, in turns or at once, and so take turns with their arithmetic."""

    @property
    def devices(self) -> int:
        if self.together:
            return max(self.inference_devices, self.training_devices)
        return self.inference_devices + self.training_devices

    @property
    def samples_per_s(self) -> float:
        """The slower side decides."""
        if self.together:
            return self.inference * self.training / max(self.inference + self.training, 1e-9)
        return min(self.inference, self.training, *([] if self.transport is None else [self.transport]))

    @property
    def slow_side(self) -> str:
        if self.transport is not None and self.transport < min(self.inference, self.training):
            return "transport"
        return "inference" if self.inference < self.training else "training"

    @property
    def name(self) -> str:
        if self.together:
            return f"{self.devices} for both"
        return f"{self.inference_devices} + {self.training_devices}"


def busy_ranks(samples_per_step: int, ranks: int) -> float:
    """Ranks' worth of work in a step: the others wait for those that have a sample more (equal lengths assumed)."""
    return samples_per_step / -(-samples_per_step // ranks) if ranks else 0.0


def split(sides: Sides, inference_devices: int, training_devices: int, together: bool = False) -> Split:
    """Rates of this division of the devices."""
    return Split(
        inference_devices=inference_devices,
        training_devices=training_devices,
        inference=inference_devices // sides.devices_per_generator * sides.per_generator,
        training=busy_ranks(sides.samples_per_step, training_devices // sides.devices_per_rank) * sides.per_rank,
        transport=sides.transport,
        together=together,
    )


def all_splits(sides: Sides, devices: int) -> tuple[Split, ...]:
    """Every division of `devices` into whole generators and at least one rank."""
    step, least = sides.devices_per_generator, sides.devices_per_rank
    return tuple(split(sides, count, devices - count) for count in range(step, devices - least + 1, step))


def best_split(sides: Sides, devices: int) -> Split | None:
    """The division with the most samples per second (of equals, the most training devices), or None."""
    return max(all_splits(sides, devices), key=lambda one: (one.samples_per_s, one.training_devices), default=None)


def measured_sides(rates: SideRates, mean_tokens: float, assumed: Sides) -> Sides | None:
    """The sides as a run measured them; None before both were measured."""
    if not rates.inference or not rates.training or not rates.generators or mean_tokens <= 0:
        return None
    found = {
        "per_generator": rates.inference / rates.generators / mean_tokens,
        "per_rank": rates.training / busy_ranks(assumed.samples_per_step, rates.ranks // assumed.context) / mean_tokens,
        "transport": rates.transport / mean_tokens if rates.transport else None,
    }
    return assumed.model_copy(update=found)


def advice(sides: Sides, present: Split, unit: str) -> str:
    """One sentence: the better split, or that there is none. `unit`: what is divided, `GPU` or `core`."""
    devices = present.devices
    best = best_split(sides, devices)
    if best is None and present.together:
        return f"{plural(devices, unit)} cannot be divided"
    if best is None or best.samples_per_s < present.samples_per_s * (1 + WORTH_SAYING):
        name = present.name if present.together else f"{present.name} (inference + training)"
        return f"no other one of {plural(devices, unit)} is better than {name}"
    gain = best.samples_per_s / present.samples_per_s - 1
    return (
        f"{best.name} {unit}s (inference + training) would give {best.samples_per_s:.3g} samples/s, {gain:.0%} more "
        f"than {present.name}"
    )
