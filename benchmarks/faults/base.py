"""What a fault is, and what it is given to strike at."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import psutil
from two_hosts import Hosts

from faults.clock import Clock
from infra.files.run_folder import RunFolder


class Missed(Exception):
    """The run ended, or what the fault strikes at went away, before it could strike."""


@dataclass(frozen=True)
class Ground:
    """Where a run takes place: its transport, its ledger, its machines."""

    name: str
    transport: Literal["arena", "files", "stored", "mooncake"]
    overrides: tuple[str, ...] = ()
    postgres: Path | None = None
    """Folder of its PostgreSQL; the ledger is a SQLite file where None."""
    hosts: Hosts | None = None
    mounts: bool = False
    """Whether run folder, objects and shared memory are small file systems of the run's own."""
    clock: Clock | None = None
    """The clock that everything on this ground sees, where it can be moved."""


class Scene(Protocol):
    """A run under fire, as a fault sees it."""

    dice: random.Random
    ground: Ground
    folder: RunFolder
    objects: Path
    """Folder given to the transport as `transport.folder`, on grounds that have one."""
    memory: Path
    """Shared memory of the run."""
    has_stopped: bool
    """Whether the run has stopped, as the present fault says that it may."""

    def pick(self, kind: str) -> list[psutil.Process]:
        """Processes of a kind, such as `generator and rank`; waits for them. Raises Missed."""
        ...

    def kill_flow(self) -> None:
        """SIGKILL to whoever owns the run. Raises Missed."""
        ...

    def resume(self) -> None:
        """Start a fresh owner, which resumes the run."""
        ...

    def note(self, detail: str) -> None:
        """Add a detail, such as a file's name, to what is recorded of this fault."""
        ...


Strike = Callable[[Scene], AbstractContextManager[None]]
"""Inject on entry, heal on exit. Raises Missed on entry."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    strike: Strike
    applies: Callable[[Ground], bool] = field(default=lambda _ground: True)
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest time between injection and healing."""
    phase: Literal["before", "running", "dead", "rest"] = "running"
    """When it strikes. `before`: it holds before the run starts, to its end. `running`: while it runs. `dead`: while
    nobody owns it, between a killed owner and the next one. `rest`: like `running`, but it is healed only when the run
    has ended."""
    has_target: Callable[[Scene], bool] = field(default=lambda _scene: True)
    """Whether what it strikes at is there yet."""
    stops: str | None = None
    """Regular expression of the sentence with which the run may stop; once healed, it is resumed as a person would.
    None: the run must go on by itself."""
    overrides: tuple[str, ...] = ()
    """Settings that a run needs for this fault."""
