"""The interface of capture engines, which prefill samples and write their hidden states to the transport."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from infra.records.data_path import ObjectRecord


class EngineError(Exception):
    """The engine is broken; the sample is not at fault."""


@dataclass(frozen=True)
class Captured:
    """A sample's hidden states in the transport."""

    record: ObjectRecord
    put_s: float
    """Seconds of the write."""


@dataclass(frozen=True)
class Continued:
    """A prompt of P tokens with the target's greedy continuation of N tokens."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    """Ends with an end-of-text token or at the length limit."""
    aux: Tensor
    """`[P + N - 1, K*H]` CPU features of all tokens but the last, in the stored data type."""


class CaptureEngine(Protocol):
    """Prefills with the target."""

    in_flight: int
    """Samples that it captures at the same time, each called from its own thread."""

    def check_canary(self, tokens: Tensor) -> None:
        """Capture `tokens` `[T]` and compare them with an independent forward. Raises Refusal for a difference."""
        ...

    def capture(self, key: str, tokens: Tensor) -> Captured:
        """Prefill `tokens` `[T]` and write their hidden states under `key`.

        Raises SampleError if this sample cannot be captured. Any other exception is a fault of the engine or the
        machine and ends the generator: EngineError, a full disk, a lost device, an error of a library.
        """
        ...

    def continue_greedily(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Continued]:
        """Greedy continuations of `prompts` of 1 to `max_new_tokens` tokens, with features. May raise EngineError."""
        ...

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        ...
