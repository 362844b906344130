"""What every stage of the GPU acceptance gets, and what it leaves behind."""

import json
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from infra.files.atomic import write_atomically

ABSENT = 77
"""Exit status of a stage whose subject this machine does not have."""


class AbsentError(Exception):
    """The machine lacks what the stage is about, so there is nothing to measure."""


@dataclass
class Bench:
    """The surroundings of one stage, which runs in a process of its own."""

    device: str
    """`cuda`, or `cpu`: tiny shapes, which try the stage's code and measure nothing."""
    work: Path
    """A folder that all stages of one acceptance share."""
    stage: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def file(self) -> Path:
        """Where the stage's figures are, so far."""
        return self.work / f"{self.stage}.json"

    def note(self, **figures: Any) -> None:
        """Keep figures, also those of a stage that fails later or is stopped."""
        self.figures |= figures
        write_atomically(self.file, json.dumps(self.figures) + "\n")

    def pick(self, on_gpu: Any, on_cpu: Any) -> Any:
        """The first on a GPU, the second in a trial on the CPU."""
        return on_gpu if self.is_gpu else on_cpu


def check(holds: bool, failure: str) -> None:
    """Raises ValueError with this failure unless it holds."""
    if not holds:
        raise ValueError(failure)


@dataclass(frozen=True)
class Stage:
    """One part of the acceptance."""

    name: str
    what: str
    function: str
    """`module.function` of this package; only the stage's own process imports it."""
    limit_s: float
    """Longest duration on a GPU."""
    gpus: int = 1
    """The machine needs at least as many."""
    required: bool = False
    """Whether no other stage makes sense without it."""

    def run(self, bench: Bench) -> None:
        """Raises what its code raises, and AbsentError."""
        module, name = self.function.split(".")
        getattr(import_module(f"gpu_stages.{module}"), name)(bench)
