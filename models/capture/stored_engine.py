"""An engine for transport.kind=stored, which captures each text once."""

import hashlib
import json
from collections.abc import Sequence

from torch import Tensor

from infra.transport.stored import StoredTransport
from models.capture.engine import Captured, CaptureEngine, Continued
from models.run import PreparedRun


class StoredEngine:
    """Delegates samples that are not stored yet to another engine."""

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
