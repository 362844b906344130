"""The SGLang engine: one server per generator, whose plugin writes the hidden states."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from infra.processes.process import Owner
from infra.records.data_path import CaptureReply
from infra.records.drafts import CapturePrecision
from infra.records.sharing import Sharing
from infra.refusal import Refusal
from infra.settings import CAPTURE, server_machines, sglang_environment
from infra.sglang.client import Answer, PromptRefusedError, ServerError, SGLangClient
from infra.sglang.command import ServerSpec, capture_command, server_environment
from infra.sglang.config import SLOWEST_TOKEN_S, SGLangConfig
from infra.sglang.server import SGLangServer
from infra.transport.base import CANARY
from models.capture.engine import (
    Captured,
    Continued,
    EngineError,
    check_capture,
    check_embedded,
    check_next_tokens,
    check_same,
)
from models.capture.ranking import check_ranking
from models.capture.sglang.model_class import CAPTURED_AS
from models.capture.sglang.plugin import NAME
from models.capture.sglang.tap import capture_spec_of
from models.data.images import ImageProcessor, asked_with
from models.data.media import Prompt
from models.decoding.plain import end_of
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.architecture import has_experts, read_model_config
from models.targets.dequantized import load_dequantized, stream_dequantized
from models.targets.hidden_states import HiddenStates
from models.targets.layout import SampleError
from models.targets.model import TargetModel, eos_ids
from models.targets.weights import TargetHead, read_target_head, weight_bytes

PREFILL = MappingProxyType({"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
"""Sampling parameters of a request whose answer is of no use."""
FAULTS = {"sample": SampleError, "engine": EngineError, "setting": Refusal}
"""Exception for each kind of fault in a plugin's reply."""
KERNELS = (
    *("attention_backend", "prefill_attention_backend", "kv_cache_dtype", "moe_runner_backend"),
    *("fp8_gemm_runner_backend", "fp4_gemm_runner_backend"),
)
"""Settings of SGLang that decide how hidden states are rounded."""
CANARY_ANSWER = 8
SCALED_OTHERWISE = 0.25
"""Relative difference that embeddings of an image may have, which another library scales to the vision model's size."""
LOADED_BYTES = 4 * 2**30
"""Targets with at most this size of weights are loaded to be compared; larger ones are read weight by weight."""
DEQUANTIZED = 4
"""How many times larger a quantized target is in floating-point numbers, at most."""


class SGLangEngine:
    """Starts a server, and requests one token for every sample."""

    waits = False

    def __init__(self, run: PreparedRun, index: int):
        self.run, self.layout, self.transport = run, run.layout, run.open_transport()
        self.settings, self.target = run.config.generator.sglang, Path(run.target.path)
        self.in_flight = run.config.generator.in_flight
        self._serial, self._index, self._streamed = count(), index, False
        self._answers = run.samples.unanswered > 0 and not self.waits
        self._canary = f"{run.folder.name}{CANARY}{index}-{os.getpid()}"
        self._client = self._connect()

    def _connect(self) -> SGLangClient:
        run, name = self.run, f"sglang-{self._index}"
        owner, timeout_s = Owner(run.folder.name, run.folder.logs), self.settings.start_timeout_s
        self.server = SGLangServer(self._command, name, owner, self._environment(), timeout_s, server_machines())
        longest_s = self.settings.request_timeout_s
        if self._answers:
            longest_s += run.samples.longest * SLOWEST_TOKEN_S
        return SGLangClient(self.server, longest_s, timeout_s)

    def _command(self, port: int) -> list[str]:
        config = self.run.config
        longest = self.run.samples.longest + 1
        spec = ServerSpec(self.target, config.capture_dtype, longest, self.in_flight)
        settings = within_share(self.settings, self.run.sharing)
        if not config.draft.reads_layers:
            settings = _as_captured(settings, spec.target)
        return capture_command(spec, settings, config.target.aux_layer_ids, port, self._answers)

    def _environment(self) -> dict[str, str]:
        """Environment of the server, with the plugin's capture specification."""
        config, spec = self.run.config.generator, capture_spec_of(self.run)
        return server_environment(self.settings, config.threads, config.count) | {CAPTURE: spec.model_dump_json()}

    def precision(self) -> CapturePrecision:
        try:
            resolved = self._client.settings()
        except ServerError as error:
            raise EngineError(str(error)) from error
        return CapturePrecision(
            quantization=self.run.config.served_quantization(self.run.target.quantization),
            dtype=self.run.config.capture_dtype,
            engine=f"sglang {resolved['version']}",
            kernels={name: str(resolved[name]) for name in KERNELS if resolved.get(name) not in (None, "auto")},
            answering=self._answers,
        )

    def capture(self, key: str, tokens: Tensor, images: Sequence[Path] = ()) -> Captured:
        return self.request(key, tokens, images, PREFILL)[0]

    def answer(self, key: str, prompt: Tensor, max_new_tokens: int) -> Captured:
        settings = self.run.config.data.regeneration
        assert settings is not None, "no sample is a prompt without data.regeneration"
        ends = sorted(eos_ids(self.target))
        sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "stop_token_ids": ends}
        captured, tokens = self.request(key, prompt, (), sampling | {"max_new_tokens": max_new_tokens})
        return replace(captured, answer=tuple(tokens[:-1]))

    def request(
        self, key: str, tokens: Tensor, images: Sequence[Path], sampling: Mapping[str, Any]
    ) -> tuple[Captured, list[int]]:
        """Answer one prompt. Returns the hidden states of all that was read in the transport, and the answer."""
        asked = {**sampling, "custom_params": self._marks(key)}
        try:
            prompt, more = asked_with(Prompt(tuple(tokens.tolist()), tuple(images)), self.run.target.media_ids)
            answer = self._generate(prompt, asked, **more)
        except PromptRefusedError as error:
            raise SampleError(str(error)) from error
        except ServerError as error:
            raise EngineError(str(error)) from error
        replies = answer.meta.get(NAME)
        if not replies:
            raise Refusal(
                "SGLang answered without hidden states: the capture plugin did not attach (no entry point draftsmith "
                f"in {sglang_environment()}, or $SGLANG_PLUGINS leaves it out); its log is {self._client.server.log}"
            )
        reply = CaptureReply.model_validate(replies[0])
        if reply.record is None:
            raise FAULTS[reply.fault](f"capture in SGLang failed: {reply.error}")
        return Captured(reply.record, reply.put_s), answer.tokens

    def _generate(self, tokens: Sequence[int], sampling: dict[str, Any], **more: Any) -> Answer:
        return self._client.generate(tokens, sampling, **more, **self._settings())

    def _marks(self, key: str) -> dict[str, Any]:
        """By what the plugin tells a request that is captured."""
        return {NAME: key}

    def _settings(self) -> dict[str, Any]:
        """Further settings of every such request."""
        return {}

    def check_canary(self, tokens: Tensor, images: Sequence[Path] = ()) -> None:
        """Capture the prompt twice, which fails with a prefix cache, and compare every captured state."""
        for attempt in (1, 2):
            try:
                hidden, emitted = self._take_back(str(attempt), tokens, images, PREFILL)
            except SampleError as error:
                raise Refusal(f"canary: {error}") from error
            path, dtype = self.target, DTYPES[self.run.config.capture_dtype]
            head = read_target_head(path, dtype)
            check_next_tokens(head, hidden.last[-1:], torch.tensor(emitted), self.layout.dtype)
            if hidden.top is not None:
                check_next_tokens(head, hidden.last, hidden.top, self.layout.dtype)
        if self._answers:
            self._check_answer(tokens)
        obstacle = self._compare_seen(hidden, tokens, images) if images else self._compare(hidden, tokens, head)
        if obstacle is not None:
            print(f"canary: compared the final states only, not the chosen layers: {obstacle}", flush=True)

    def _check_answer(self, tokens: Tensor) -> None:
        """Compare what is captured while the target answers with a prefill of the same text. Raises Refusal."""
        sampling = {"temperature": 0.0, "max_new_tokens": CANARY_ANSWER, "ignore_eos": True}
        written, answer = self._take_back("answer", tokens, (), sampling)
        read, _ = self._take_back("read", torch.tensor([*tokens.tolist(), *answer[:-1]]), (), PREFILL)
        check_same(written, read, self.layout, DTYPES[self.run.config.capture_dtype])

    def _compare_seen(self, hidden: HiddenStates, tokens: Tensor, images: Sequence[Path]) -> str | None:
        """Compare the capture of a sample with images; returns why it cannot be compared."""
        path, dtype = self.target, DTYPES[self.run.config.capture_dtype]
        quantized = self.run.config.served_quantization(self.run.target.quantization) is not None
        if quantized or weight_bytes(path, dtype) > LOADED_BYTES:
            return "the target is too large, or quantized, to be compared with an image"
        target = TargetModel.load(path, self.run.config.target.aux_layer_ids, dtype, sees=True)
        # Pixels may be rounded otherwise: SGLang scales images by torchvision, this process by Pillow.
        seen = ImageProcessor(path).inputs(tokens, images)
        check_ranking(target, hidden, tokens, self.layout, seen)
        check_embedded(target, hidden, tokens, seen, SCALED_OTHERWISE)
        return None

    def _compare(self, hidden: HiddenStates, tokens: Tensor, head: TargetHead) -> str | None:
        """Compare a capture with a forward in transformers on the CPU; returns why its layers cannot be compared."""
        path, dtype = self.target, DTYPES[self.run.config.capture_dtype]
        layers, nbytes = self.run.config.target.aux_layer_ids, weight_bytes(path, dtype)
        quantized = self.run.config.served_quantization(self.run.target.quantization) is not None
        large = nbytes > (LOADED_BYTES // DEQUANTIZED if quantized else LOADED_BYTES)
        if large:
            if self._streamed:
                return None  # after a sample that failed, reading all weights again would take too long
            self._streamed = True
            print(f"canary: reading {nbytes / 2**30:.0f} GiB of weights, to compare the chosen layers", flush=True)
        if quantized:
            try:
                model = (stream_dequantized if large else load_dequantized)(path, dtype)
            except Refusal as error:
                return str(error)
            check_ranking(TargetModel(model, layers, head=head), hidden, tokens, self.layout)
        elif large:
            return self._compare_streamed(hidden, tokens, head, nbytes)
        else:
            check_capture(TargetModel.load(path, layers, dtype), hidden, tokens, self.layout)
        return None

    def _compare_streamed(self, hidden: HiddenStates, tokens: Tensor, head: TargetHead, nbytes: int) -> str | None:
        path, layers = self.target, self.run.config.target.aux_layer_ids
        room = self.run.folder.path / f"canary-{self._index}"
        shutil.rmtree(room, ignore_errors=True)  # of a generator that was killed
        if has_experts(read_model_config(path)) and shutil.disk_usage(room.parent).free < nbytes:
            return f"stacking its experts needs {nbytes / 2**30:.0f} GiB of free space in {room.parent}"
        try:
            check_ranking(TargetModel.streamed(path, layers, head.head.dtype, head, room), hidden, tokens, self.layout)
        except NotImplementedError as error:
            return f"accelerate cannot read this target's weights one by one ({error})"  # Llama 4's, transformers 5.23
        finally:
            shutil.rmtree(room, ignore_errors=True)
        return None

    def _take_back(
        self, name: str, tokens: Tensor, images: Sequence[Path], sampling: Mapping[str, Any]
    ) -> tuple[HiddenStates, list[int]]:
        """The hidden states of all that was read, deleted from the transport, and the answer."""
        key = f"{self._canary}/{name}-{next(self._serial)}"
        try:
            captured, answer = self.request(key, tokens, images, sampling)
            hidden = self.layout.empty(len(tokens) + len(answer) - 1)
            self.transport.get(captured.record, self.layout.views(hidden))
        finally:
            self.transport.delete(key)
        hidden = self.layout.restored(hidden)
        self.layout.check(hidden, len(hidden.last))
        return hidden, answer

    def continue_greedily(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Continued]:
        """Generate on the server, and capture on the way."""
        ends = eos_ids(self.target)
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "stop_token_ids": sorted(ends)}

        def one(index: int) -> Continued:
            prompt = prompts[index]
            asked = torch.tensor(prompt.tokens)
            hidden, answer = self._take_back(f"heldout-{index}", asked, prompt.images, sampling)
            text = tuple(end_of(answer, ends))
            read = hidden.rows(slice(len(prompt.tokens) + len(text) - 1))
            return Continued.of(prompt, text, read, read.features.dtype)

        with ThreadPoolExecutor(self.in_flight) as threads:
            return list(threads.map(one, range(len(prompts))))

    def close(self) -> None:
        if not self.waits:
            self.server.stop()
        self._client.close()


def _as_captured(settings: SGLangConfig, target: Path) -> SGLangConfig:
    """Settings of a server that loads the target by a class that captures; see `CAPTURED_AS`."""
    architectures = json.loads((target / "config.json").read_text()).get("architectures") or [""]
    if architectures[0] not in CAPTURED_AS:
        return settings
    other = json.dumps({"architectures": [CAPTURED_AS[architectures[0]]]})
    return settings.model_copy(update={"arguments": ("--json-model-override-args", other, *settings.arguments)})


def within_share(settings: SGLangConfig, sharing: Sharing) -> SGLangConfig:
    """Settings of a server that keeps to its part of a GPU on which a trainer runs too.

    Weights and cache are a fraction of what is free when the server starts: of the generator's part once the trainer
    has filled its own. The cap on the cache's tokens holds where the trainer has not.
    """
    if sharing.static_bytes is None or sharing.generator_bytes is None:
        return settings
    fraction = settings.memory_fraction or round(sharing.static_bytes / sharing.generator_bytes, 3)
    arguments = ("--max-total-tokens", str(sharing.cache_tokens), *settings.arguments)
    return settings.model_copy(update={"memory_fraction": fraction, "arguments": arguments})
