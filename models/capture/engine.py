"""The contract of a generator's engine: it prefills samples and leaves their hidden states in the transport."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from infra.records.data_path import ObjectRecord


class EngineError(Exception):
    """The engine is broken; no sample is to blame."""


@dataclass(frozen=True)
class Captured:
    """A sample's hidden states in the transport."""

    record: ObjectRecord
    put_s: float
    """Seconds of writing."""


@dataclass(frozen=True)
class Continued:
    """A prompt of P tokens with the target's own greedy continuation of N."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    """The prefill token first; ends with the text or at its length limit."""
    aux: Tensor
    """`[P + N - 1, K*H]` target features of all tokens but the last, in the stored data type, on the CPU."""


class CaptureEngine(Protocol):
    """The plain one runs in the generator, others beside it."""

    in_flight: int
    """Samples that it captures at the same time, each from a thread of its own."""

    def check_canary(self, tokens: Tensor) -> None:
        """Capture `tokens` `[T]` and compare with an independent forward. Raises Refusal naming what is wrong."""
        ...

    def capture(self, key: str, tokens: Tensor) -> Captured:
        """Prefill `tokens` `[T]` and write their hidden states under `key`.

        Raises SampleError where this sample cannot be captured. Any other exception is a fault of the engine or of the
        machine, and ends the generator: EngineError, a full disk, a lost device, whatever a library raises.
        """
        ...

    def continue_greedily(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Continued]:
        """The target's own continuations of `prompts`, of at least one and at most `max_new_tokens` tokens, with its
        features.

        Raises EngineError when the engine is broken.
        """
        ...

    def close(self) -> None:
        """Stop what was started. Idempotent."""
        ...
