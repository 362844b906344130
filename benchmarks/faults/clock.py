"""A wall clock that jumps, for the processes of a run and their database; the machine's own clock stays as it is.

A small library, compiled here and preloaded, adds an offset from a file to what the kernel says. The kernel's own
times, such as those of files, do not move.
"""

import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.base import Scene

SOURCE = Path(__file__).with_name("clock.c")
JUMP_S = 7200
COMPILE_S = 60


@dataclass(frozen=True)
class Clock:
    """A clock that can be moved."""

    library: Path
    offset: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a process that follows this clock is started with."""
        return {"LD_PRELOAD": str(self.library), "CHAOS_CLOCK": str(self.offset)}

    def move(self, seconds: int) -> None:
        """Let the clock show so much more than the machine's own; a negative number for less."""
        with self.offset.open("rb+") as file:  # the same file: processes have it mapped
            file.write(struct.pack("l", seconds))


def make_clock(folder: Path) -> Clock | None:
    """A clock whose files lie in `folder`, which every user may enter; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    clock = Clock(folder / "clock.so", folder / "clock.offset")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(clock.library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=COMPILE_S)
    clock.offset.write_bytes(struct.pack("l", 0))
    for file in (clock.library, clock.offset):
        file.chmod(0o755)
    return clock


def jump(seconds: int, stays: bool):
    """The clock jumps, and jumps back when healed unless it `stays`."""

    @contextmanager
    def strike(scene: "Scene") -> Iterator[None]:
        clock = scene.ground.clock
        assert clock is not None
        clock.move(seconds)
        try:
            yield
        finally:
            if not stays:
                clock.move(0)

    return strike
