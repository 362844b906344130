"""Measures where the time of speculative decoding goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

Part = Literal["draft", "target", "decide", "realign"]
"""Proposing; the target's forward and logits; which proposals are accepted; masks, positions and the cache's rows."""


@dataclass
class StepSeconds:
    """One verification step."""

    texts: int
    tokens: int = 0
    """Tokens per text that the target verified, padding included: 1 + the largest number of proposals."""
    emitted: int = 0
    """Emitted tokens of all texts, without those after a text's end."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(get_args(Part), 0.0))


@dataclass
class Stopwatch:
    """Watches every step of `decode_together`."""

    device: torch.device
    steps: list[StepSeconds] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        begun = now(self.device, self.clock)
        yield
        self.steps[-1].seconds[name] += now(self.device, self.clock) - begun


def now(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the clock, once `device` has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def part_of(watch: Stopwatch | None, name: Part) -> AbstractContextManager[None]:
    """Time a part of the newest step where somebody wants to know."""
    return nullcontext() if watch is None else watch.part(name)
