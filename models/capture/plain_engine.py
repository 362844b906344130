"""The plain engine: the target in transformers, one sample per forward, in the generator's process."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import transformers
from torch import Tensor

from infra.records.drafts import CapturePrecision
from models.capture.engine import Captured, Continued, check_capture
from models.data.images import ImageProcessor
from models.data.media import Prompt
from models.decoding.after_images import continue_seen
from models.decoding.continuations import continue_batch
from models.devices import compute_device
from models.drafts.sampling import Sampling
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel, eos_ids


class PlainEngine:
    """Captures without batches, so values depend on nothing but the sample."""

    in_flight = 1
    waits = False

    def __init__(self, run: PreparedRun):
        self.layout, self.transport = run.layout, run.open_transport()
        dtype = DTYPES[run.config.capture_dtype]
        self._folder = Path(run.target.path)
        self._eos_ids, self._media_ids = eos_ids(self._folder), frozenset(run.target.media_ids)
        self._sampling, self._seed = run.config.data.regeneration, run.config.seed
        layers, sees = run.config.target.aux_layer_ids, run.config.data.images is not None
        self.target = TargetModel.load(self._folder, layers, dtype, compute_device(), sees=sees)

    def precision(self) -> CapturePrecision:
        dtype = str(self.target.head_weight.dtype).removeprefix("torch.")
        return CapturePrecision(quantization=None, dtype=dtype, engine=f"transformers {transformers.__version__}")

    def prefill(self, tokens: Tensor, images: Sequence[Path] = ()) -> HiddenStates:
        """Hidden states of `tokens` `[T]`, without the top tokens."""
        given, embedded = tokens[None].to(self.target.device), self.layout.embedded
        hidden = self.target.forward(given, seen=self._seen(tokens, images), embedded=embedded)
        return HiddenStates(**{name: rows[0] for name, rows in hidden.named().items()})

    def check_canary(self, tokens: Tensor, images: Sequence[Path] = ()) -> None:
        read = self.layout.restored(self.layout.stored(self._capture(tokens, images)))
        check_capture(self.target, read, tokens, self.layout, self._seen(tokens, images))

    def _seen(self, tokens: Tensor, images: Sequence[Path]) -> dict[str, Tensor]:
        """What the model reads of images, on its device."""
        return self._images.inputs(tokens, images, self.target.head_weight) if images else {}

    @cached_property
    def _images(self) -> ImageProcessor:
        return ImageProcessor(self._folder)

    def _capture(self, tokens: Tensor, images: Sequence[Path]) -> HiddenStates:
        hidden = self.prefill(tokens, images)
        return replace(hidden, top=self.target.top_tokens(hidden.last)) if self.layout.top_token else hidden

    def capture(self, key: str, tokens: Tensor, images: Sequence[Path] = ()) -> Captured:
        hidden = self._capture(tokens, images)
        self.layout.check(hidden, len(tokens))
        begun = time.perf_counter()
        record = self.transport.put(key, self.layout.pack(hidden))
        return Captured(record, time.perf_counter() - begun)

    def answer(self, key: str, prompt: Tensor, max_new_tokens: int) -> Captured:
        """Answer, then prefill; a prompt has the same answer whenever it is asked."""
        assert self._sampling is not None, "no sample is a prompt without data.regeneration"
        seed = int.from_bytes(hashlib.sha256(prompt.numpy().tobytes()).digest()[:7]) ^ self._seed
        random = torch.Generator(self.target.device).manual_seed(seed)
        sampling = Sampling(self._sampling.temperature, self._sampling.top_p, random)
        (text,) = continue_batch(self.target, [prompt.tolist()], max_new_tokens, self._eos_ids, sampling)
        kept = tuple(text[:-1])
        return replace(self.capture(key, torch.tensor([*prompt.tolist(), *kept])), answer=kept)

    def continue_greedily(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Continued]:
        plain = iter(
            continue_batch(self.target, [p.tokens for p in prompts if not p.images], max_new_tokens, self._eos_ids)
        )
        texts = [self._continue_seen(p, max_new_tokens) if p.images else next(plain) for p in prompts]
        found = []
        for prompt, text in zip(prompts, texts, strict=True):
            read = torch.tensor([*prompt.tokens, *text][:-1])
            hidden = self.prefill(read, prompt.images)
            found.append(Continued.of(prompt, text, hidden, self.layout.restored_dtype))
        return found

    def _continue_seen(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        tokens = torch.tensor(prompt.tokens)
        seen, ends = self._seen(tokens, prompt.images), self._eos_ids | self._media_ids
        return continue_seen(self.target, tokens, seen, max_new_tokens, ends)

    def close(self) -> None:
        """Nothing to stop."""
