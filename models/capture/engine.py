"""A generator's engine prefills samples and writes their hidden states into the transport."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from infra.records.data_path import ObjectRecord
from infra.transport.stored import StoredTransport
from models.capture.canary import check_capture
from models.decoding.plain import continue_batch
from models.decoding.simulated import features
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.model import HiddenStates, TargetModel, eos_ids


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


class PlainEngine:
    """Values depend on nothing but the sample: no batches."""

    in_flight = 1

    def __init__(self, run: PreparedRun):
        self.layout, self.transport = run.layout, run.open_transport()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = DTYPES[run.config.generator.compute_dtype]
        self._eos_ids = eos_ids(Path(run.target.path))
        self.target = TargetModel.load(Path(run.target.path), run.config.target.aux_layer_ids, dtype, device)

    def prefill(self, tokens: Tensor) -> HiddenStates:
        """Hidden states of one sample, `tokens` `[T]`."""
        hidden = self.target.forward(tokens[None].to(self.target.device))
        return HiddenStates(aux=hidden.aux[0], last=hidden.last[0])

    def check_canary(self, tokens: Tensor) -> None:
        check_capture(self.target, self.prefill(tokens), tokens, self.layout)

    def capture(self, key: str, tokens: Tensor) -> Captured:
        hidden = self.prefill(tokens)
        self.layout.check(hidden, len(tokens))
        begun = time.perf_counter()
        record = self.transport.put(key, self.layout.pack(hidden))
        return Captured(record, time.perf_counter() - begun)

    def continue_greedily(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Continued]:
        texts = continue_batch(self.target, prompts, max_new_tokens, 0.0, self._eos_ids)
        return [
            Continued(tuple(prompt), tuple(text), features(self.target, [*prompt, *text]).to("cpu", self.layout.dtype))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def close(self) -> None:
        """Nothing was started."""


class StoredEngine:
    """Asks the other engine for what is not stored yet."""

    def __init__(self, run: PreparedRun, inner: CaptureEngine):
        self._inner, self.in_flight = inner, inner.in_flight
        transport = run.open_transport()
        assert isinstance(transport, StoredTransport)
        self._transport = transport
        config = run.config
        self._what = json.dumps(
            [
                run.target.revision,
                config.target.aux_layer_ids,
                config.generator.compute_dtype,
                config.generator.stored_dtype,
                config.generator.engine,
            ]
        )

    def check_canary(self, tokens: Tensor) -> None:
        self._inner.check_canary(tokens)

    def capture(self, key: str, tokens: Tensor) -> Captured:
        name = hashlib.sha256(self._what.encode() + tokens.numpy().tobytes()).hexdigest()
        record = self._transport.find(name)
        captured = self._inner.capture(name, tokens) if record is None else Captured(record, 0.0)
        return Captured(captured.record.model_copy(update={"key": key}), captured.put_s)

    def continue_greedily(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Continued]:
        return self._inner.continue_greedily(prompts, max_new_tokens)

    def close(self) -> None:
        self._inner.close()
