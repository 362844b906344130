"""Progress of long work: bars on a terminal, occasional lines in a log."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from infra.quantities import duration

LINE_S = 15.0

T = TypeVar("T")

Advance = Callable[[int], None]
Bar = Callable[[str, int], Advance]
"""Opens a bar with a total of steps; the result is called with the steps just done."""


@contextmanager
def bars() -> Iterator[Bar]:
    """Progress bars on a terminal, elsewhere lines at most every `LINE_S` seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:

        def bar(description: str, steps: int) -> Advance:
            task = shown.add_task(description, total=steps)
            return lambda done: shown.advance(task, done)

        yield bar


def _lines(description: str, steps: int) -> Advance:
    begun = time.monotonic()
    state = {"done": 0, "said": begun}

    def advance(done: int) -> None:
        state["done"] += done
        if time.monotonic() - state["said"] >= LINE_S and state["done"] < steps:
            state["said"] = time.monotonic()
            left_s = (steps - state["done"]) * (state["said"] - begun) / max(1, state["done"])
            print(f"{description}: {state['done']} of {steps}, about {duration(left_s)} left", flush=True)

    return advance


def counting(items: Iterable[T], description: str) -> Iterator[T]:
    """The same items, counted on a terminal."""
    yield from track(items, description, total=None, console=Console(stderr=True), transient=True)
