"""The plain engine: the target in transformers, one sample per forward, in the generator's process."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import transformers
from torch import Tensor

from infra.records.drafts import CapturePrecision
from models.capture.engine import Captured, Continued, check_capture
from models.decoding.plain import continue_batch
from models.decoding.simulated import features
from models.devices import compute_device
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel, eos_ids


class PlainEngine:
    """Captures without batches, so values depend on nothing but the sample."""

    in_flight = 1

    def __init__(self, run: PreparedRun):
        self.layout, self.transport = run.layout, run.open_transport()
        dtype = DTYPES[run.config.capture_dtype]
        self._eos_ids = eos_ids(Path(run.target.path))
        self.target = TargetModel.load(Path(run.target.path), run.config.target.aux_layer_ids, dtype, compute_device())

    def precision(self) -> CapturePrecision:
        dtype = str(self.target.head_weight.dtype).removeprefix("torch.")
        return CapturePrecision(quantization=None, dtype=dtype, engine=f"transformers {transformers.__version__}")

    def prefill(self, tokens: Tensor) -> HiddenStates:
        """Hidden states of `tokens` `[T]`, without the top tokens."""
        hidden = self.target.forward(tokens[None].to(self.target.device))
        return HiddenStates(aux=hidden.aux[0], last=hidden.last[0])

    def check_canary(self, tokens: Tensor) -> None:
        read = self.layout.restored(self.layout.stored(self._capture(tokens)))
        check_capture(self.target, read, tokens, self.layout)

    def _capture(self, tokens: Tensor) -> HiddenStates:
        hidden = self.prefill(tokens)
        return replace(hidden, top=self.target.top_tokens(hidden.last)) if self.layout.top_token else hidden

    def capture(self, key: str, tokens: Tensor) -> Captured:
        hidden = self._capture(tokens)
        self.layout.check(hidden, len(tokens))
        begun = time.perf_counter()
        record = self.transport.put(key, self.layout.pack(hidden))
        return Captured(record, time.perf_counter() - begun)

    def continue_greedily(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Continued]:
        texts = continue_batch(self.target, prompts, max_new_tokens, self._eos_ids)
        return [
            Continued(
                tuple(prompt),
                tuple(text),
                features(self.target, [*prompt, *text]).to("cpu", self.layout.restored_dtype),
            )
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def close(self) -> None:
        """Nothing to stop."""
