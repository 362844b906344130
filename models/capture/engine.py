"""Capture engines prefill samples and write their hidden states to the transport.

A generator is ready only after its engine passed the canary: a capture that agrees with an independent forward.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from infra.records.data_path import ObjectRecord
from infra.records.drafts import CapturePrecision
from infra.refusal import Refusal
from infra.transport.files import StoredTransport
from models.data.media import Prompt
from models.run import PreparedRun
from models.targets.architecture import media_ids
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout, SampleError
from models.targets.model import TargetModel
from models.targets.weights import TargetHead

CANARY_TOKENS = 32
"""Of a text that shows whether an engine captures rightly."""
RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Tolerance by the target's compute data type."""
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 4e-3, torch.float8_e4m3fn: 0.03}
"""Rounding by the data type of stored hidden states."""


class EngineError(Exception):
    """The engine is broken; the sample is not at fault."""


@dataclass(frozen=True)
class Captured:
    """A sample's hidden states in the transport."""

    record: ObjectRecord
    put_s: float
    """Seconds of the write."""
    answer: tuple[int, ...] | None = None
    """Of a prompt that was answered on the way: the tokens of the answer that belong to the sample."""


@dataclass(frozen=True)
class Continued:
    """A prompt of P tokens with the target's greedy continuation of N tokens."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    """Ends with an end-of-text token or at the length limit."""
    aux: Tensor
    """`[P + N - 1, K*H]` CPU features of all tokens but the last, in the stored data type."""
    shown: bool = False
    """Whether the prompt holds images."""
    embedded: Tensor | None = None
    """`[P + N - 1, H]` what the target's first layer read, where the prompt holds images and the draft reads them."""
    places: Tensor | None = None
    """`[P + N - 1, 3]` int32, with `embedded`: see HiddenStates."""

    @classmethod
    def of(cls, prompt: Prompt, continuation: Sequence[int], hidden: HiddenStates, dtype: torch.dtype) -> "Continued":
        """From the hidden states of all tokens but the last, kept in `dtype`."""
        shown = bool(prompt.images)
        return cls(
            prompt=prompt.tokens,
            continuation=tuple(continuation),
            aux=hidden.features.to("cpu", dtype),
            shown=shown,
            embedded=hidden.embedded.to("cpu", dtype) if shown and hidden.embedded is not None else None,
            places=hidden.places.cpu() if shown and hidden.places is not None else None,
        )


class CaptureEngine(Protocol):
    """Prefills with the target."""

    in_flight: int
    """Samples that it captures at the same time, each called from its own thread."""
    waits: bool
    """Whether `answer` may last for ever, until `close`: it waits for users."""

    def precision(self) -> CapturePrecision:
        """At which precision it computes. May raise EngineError."""
        ...

    def check_canary(self, tokens: Tensor, images: Sequence[Path] = ()) -> None:
        """Capture `tokens` `[T]` and compare them with an independent forward. Raises Refusal for a difference."""
        ...

    def capture(self, key: str, tokens: Tensor, images: Sequence[Path] = ()) -> Captured:
        """Prefill `tokens` `[T]`, with the images that stand in them, and write their hidden states under `key`.

        Raises SampleError if this sample cannot be captured. Any other exception is a fault of the engine or the
        machine and ends the generator: EngineError, a full disk, a lost device, an error of a library.
        """
        ...

    def answer(self, key: str, prompt: Tensor, max_new_tokens: int) -> Captured:
        """Answer `prompt` `[P]` as the recipe's regeneration does, and write the hidden states of both under `key`.

        The answer's last token was never read, so it has no hidden state and is left out. Raises as `capture` does.
        """
        ...

    def continue_greedily(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Continued]:
        """Greedy continuations of `prompts` of 1 to `max_new_tokens` tokens, with features. May raise EngineError."""
        ...

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        ...


class StoredEngine:
    """For transport.kind=stored, which captures each text once: delegates samples that are not stored yet."""

    def __init__(self, run: PreparedRun, inner: CaptureEngine):
        self._inner, self.in_flight, self.waits = inner, inner.in_flight, inner.waits
        transport = run.open_transport()
        assert isinstance(transport, StoredTransport)
        self._transport = transport
        layers, generator = run.config.target.aux_layer_ids, run.config.generator
        self._what = json.dumps(
            [
                run.target.revision,
                layers,
                run.config.capture_dtype,
                generator.stored_dtype,
                generator.engine,
                run.config.served_quantization(run.target.quantization),
                run.layout.top_token,
                run.layout.embedded,
            ]
        )

    def precision(self) -> CapturePrecision:
        return self._inner.precision()

    def check_canary(self, tokens: Tensor, images: Sequence[Path] = ()) -> None:
        self._inner.check_canary(tokens, images)

    def capture(self, key: str, tokens: Tensor, images: Sequence[Path] = ()) -> Captured:
        # Images are files named by their hashes.
        content = self._what.encode() + tokens.numpy().tobytes() + "".join(path.name for path in images).encode()
        name = hashlib.sha256(content).hexdigest()
        record = self._transport.find(name)
        captured = self._inner.capture(name, tokens, images) if record is None else Captured(record, 0.0)
        return Captured(captured.record.model_copy(update={"key": key}), captured.put_s)

    def answer(self, key: str, prompt: Tensor, max_new_tokens: int) -> Captured:
        raise AssertionError("recipes with data.regeneration.capture and stored objects are refused")

    def continue_greedily(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Continued]:
        return self._inner.continue_greedily(prompts, max_new_tokens)

    def close(self) -> None:
        self._inner.close()


@torch.no_grad()
def check_capture(
    target: TargetModel,
    captured: HiddenStates,
    tokens: Tensor,
    layout: HiddenStateLayout,
    seen: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Compare `captured`, the hidden states of `tokens` `[T]`, with those that transformers returns.

    `seen`: what the target's model reads of images (`ImageProcessor.inputs`). It may add to what layers return before
    the next ones read it (Qwen3-VL), so its layers are compared as `TargetModel.forward` captures them.

    Raises Refusal that names the difference: shapes, values of a layer, the final norm, or the predicted tokens.
    """
    try:
        layout.check(captured, len(tokens))
    except SampleError as error:
        raise Refusal(f"canary: {error}") from None
    reference = target.model(tokens[None].to(target.device), output_hidden_states=True, **seen)
    layers = [reference.hidden_states[layer_id + 1][0] for layer_id in target.aux_layer_ids]
    if seen:
        layers = layout.by_layer(target.forward(tokens[None].to(target.device), seen=seen).aux[0])
    tolerance = RELATIVE_TOLERANCE[target.head_weight.dtype] + ROUNDING[layout.dtype]
    for chunk, layer_id, expected in zip(layout.by_layer(captured.aux), target.aux_layer_ids, layers, strict=True):
        # For the last layer transformers returns the output after the final norm.
        last = layer_id + 1 == len(target.body.layers) and not seen
        _compare(
            f"layer {layer_id}", target.body.norm(chunk.to(target.head_weight)) if last else chunk, expected, tolerance
        )
    _compare("the output after the final norm", captured.last, reference.hidden_states[-1][0], tolerance)
    own = target.logits(captured.last.to(target.head_weight)).argmax(-1)
    agreement = (own == reference.logits[0].argmax(-1)).float().mean().item()
    if agreement < 0.9:
        raise Refusal(f"canary: head(last) gives the target's own next token at only {agreement:.0%} of positions")
    if captured.top is not None:
        check_next_tokens(target.head, captured.last, captured.top, layout.dtype)
    check_embedded(target, captured, tokens, seen, tolerance)


@torch.no_grad()
def check_embedded(
    target: TargetModel, captured: HiddenStates, tokens: Tensor, seen: Mapping[str, Tensor], tolerance: float
) -> None:
    """Raise Refusal unless what was captured of images is what transformers' first layer reads of them, within a
    relative `tolerance`."""
    if captured.embedded is None or not seen:
        return
    own = target.forward(tokens[None].to(target.device), seen=seen, embedded=True)
    assert own.embedded is not None
    assert own.places is not None
    if captured.places is None or not torch.equal(captured.places.cpu(), own.places[0].cpu()):
        raise Refusal("canary: positions of an image's parts differ from those of a plain forward")
    shown = torch.isin(tokens, torch.tensor(media_ids(target.model.config)))
    found, expected = captured.embedded.cpu()[shown], own.embedded[0].cpu()[shown]
    _compare("what the first layer reads of an image", found, expected, tolerance)


def check_same(written: HiddenStates, read: HiddenStates, layout: HiddenStateLayout, computed: torch.dtype) -> None:
    """Raise Refusal where states of decoding, `written`, differ from those of a prefill of the same text, `read`.

    `computed`: data type of the target's arithmetic.
    """
    tolerance = RELATIVE_TOLERANCE[computed] + ROUNDING[layout.dtype]
    for mine, theirs in zip(layout.by_layer(written.aux), layout.by_layer(read.aux), strict=True):
        _compare("a layer of an answer", mine, theirs, tolerance, "its prefill")
    _compare("the output after the final norm of an answer", written.last, read.last, tolerance, "its prefill")


def check_next_tokens(head: TargetHead, last: Tensor, tokens: Tensor, stored: torch.dtype) -> None:
    """Raise Refusal unless `tokens` `[N]`, an engine's greedy choices, are also the head's for its `last` `[N, H]`.

    A token with nearly the highest logit is accepted too, because rounding, on the way in `stored` too, may swap them.
    """
    logits = head.logits(last.to(head.head))
    tokens = tokens.to(logits.device, torch.int64)
    inside = tokens.clamp(0, logits.shape[1] - 1)
    tolerance = RELATIVE_TOLERANCE[head.head.dtype] + ROUNDING[stored]
    best = logits.amax(-1)
    gaps = (best - logits.gather(-1, inside[:, None]).squeeze(-1)) / (best - logits.mean(-1))
    wrong = (~(gaps <= tolerance) | (tokens != inside)).nonzero().flatten().tolist()
    if wrong:
        raise Refusal(
            f"canary: the engine's next token is {int(tokens[wrong[0]])}, head(last) says "
            f"{int(logits[wrong[0]].argmax())}: what was captured is not the output after the final norm"
        )


def _compare(what: str, captured: Tensor, reference: Tensor, tolerance: float, whose: str = "a plain forward") -> None:
    error = (captured.float() - reference.float()).norm() / reference.float().norm()
    if error > tolerance:
        raise Refusal(f"canary: {what} differs from {whose} by {error:.2g} (relative), allowed {tolerance:g}")
