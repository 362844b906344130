"""SGLang plugin that writes the hidden states of Draftsmith's requests to the transport, in the scheduler processes.

Its hook after `Scheduler.run_batch` (entry point group `sglang.srt.plugins`) runs before any reply is sent. With
`--enable-return-aux-hidden-states` the engine keeps for every row of a prefill

    logits_output.hidden_states       [rows, K*H]   outputs of the chosen layers
    logits_output.last_hidden_states  [rows, H]     after the final norm

A request is captured if `sampling_params.custom_params` has an object's key under "draftsmith"; the answer's
`meta_info` then has a `CaptureReply` under the same name. Other requests are not touched.

Gemma 3 is patched so that its layers return their complete output. SGLang 0.5.23 captures what a decoder layer of it
returns, but that layer leaves the last residual addition to the next layer's norm, whose CUDA kernel then overwrites
the captured tensor in place (sgl-project/sglang#39286). Llama and Qwen add before they capture. A draft must read the
same features in training and in service, so the patch applies to every engine that captures, also for its own draft.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from infra.files.run_folder import RunFolder
from infra.records.data_path import CaptureReply, CaptureSpec
from infra.refusal import Refusal
from infra.settings import capture_spec
from infra.transport.choice import open_transport
from models.capture.sglang.top_tokens import top_tokens
from models.dtypes import DTYPES
from models.targets.layout import HiddenStateLayout, SampleError
from models.targets.model import HiddenStates

NAME = "draftsmith"
"""Name of the request parameter and of the reply."""
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
GEMMA3 = "sglang.srt.models.gemma3_causal."
GEMMA3_LAYER = GEMMA3 + "Gemma3DecoderLayer.forward"
GEMMA3_CAPTURE = GEMMA3 + "Gemma3ForCausalLM.set_eagle3_layers_to_capture"
MARK = "hands_over_its_whole_output"


@dataclass
class _UnfinishedPrompt:
    request: Any
    chunks: list[HiddenStates] = field(default_factory=list)
    rows: int = 0
    error: Exception | None = None


class Assembly:
    """Rows of unfinished prompts by request. A prompt that is prefilled in one chunk is not copied."""

    def __init__(self) -> None:
        self._parts: dict[str, _UnfinishedPrompt] = {}

    def add(self, request: Any, start: int, rows: HiddenStates) -> HiddenStates | None:
        """Add the rows from position `start`; returns the whole prompt's, `[T, K*H]` and `[T, H]`, once complete.

        `request` is SGLang's `Req`. A prompt that restarts (retracted, or sent again after an abort) drops its earlier
        rows. Raises Refusal if rows before `start` are missing, and the error that was passed to `fail`.
        """
        total, count = len(request.origin_input_ids), len(rows.last)
        if start == 0:
            self._parts.pop(request.rid, None)
            if count == total:
                return rows
        part = self._parts.setdefault(request.rid, _UnfinishedPrompt(request))
        if start + count == total:
            del self._parts[request.rid]
        if part.error is not None:
            raise part.error
        if part.rows != start:
            raise Refusal(
                f"rows {part.rows}..{start - 1} of the prompt were not computed, but taken from a cache: start the "
                "server with --disable-radix-cache"
            )
        # The engine reuses its buffers for the next chunk.
        part.chunks.append(HiddenStates(**{name: tensor.clone() for name, tensor in rows.named().items()}))
        part.rows += count
        if part.rows < total:
            return None
        named = [chunk.named() for chunk in part.chunks]
        return HiddenStates(**{name: torch.cat([chunk[name] for chunk in named]) for name in named[0]})

    def fail(self, request: Any, error: Exception) -> None:
        """Keep the error of an earlier chunk, because the engine only sends the last chunk's reply."""
        if request.rid in self._parts:
            self._parts[request.rid].error = error

    def drop_finished(self) -> None:
        """Drop prompts of requests that were aborted before their last chunk."""
        for rid in [rid for rid, part in self._parts.items() if part.request.finished()]:
            del self._parts[rid]

    def __len__(self) -> int:
        return len(self._parts)


class Capture:
    """Captures the requests of one scheduler process."""

    def __init__(self, spec: CaptureSpec):
        self.layout = HiddenStateLayout(spec.aux_count, spec.hidden_size, DTYPES[spec.dtype], spec.top_token)
        self.transport = open_transport(spec.transport, RunFolder(spec.run))
        self.assembly = Assembly()
        self.copier = HostCopier()

    def take(self, scheduler: Any, batch: Any, output: Any, top: Tensor | None) -> list[dict[str, Any] | None]:
        """Write the prompts that this prefill completed. Returns one reply per request, None if not captured.

        `top`: the target's top token of every row, where the run asks for it.
        """
        self.assembly.drop_finished()
        replies: list[dict[str, Any] | None] = []
        computed, offset = HiddenStates(output.hidden_states, output.last_hidden_states, top), 0
        for request, count, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            rows = slice(offset, offset + count)
            offset += count
            key = (request.sampling_params.custom_params or {}).get(NAME)
            # A retracted request returns with answer tokens after its prompt: it was already captured.
            if key is None or request.output_ids:
                replies.append(None)
                continue
            reply = self._take_one(scheduler, request, key, start, computed, rows)
            replies.append(None if reply is None else reply.model_dump(mode="json"))
        return replies

    def _take_one(
        self, scheduler: Any, request: Any, key: str, start: int, computed: HiddenStates, rows: slice
    ) -> CaptureReply | None:
        """The reply, or None before the last chunk. An error fails only this request, never the engine."""
        try:
            if not {"aux", "last"} <= computed.named().keys():
                raise Refusal("the engine kept no hidden states: start it with --enable-return-aux-hidden-states")
            parts = computed.rows(rows).named()
            hidden = HiddenStates(**{name: self.copier.host(part, scheduler) for name, part in parts.items()})
            whole = self.assembly.add(request, start, hidden)
            if whole is None:
                return None
            self.layout.check(whole, len(request.origin_input_ids))
            begun = time.perf_counter()
            record = self.transport.put(key, self.layout.pack(whole))
            return CaptureReply(record=record, put_s=time.perf_counter() - begun)
        except Exception as error:  # noqa: BLE001 (an exception here would end the engine; the reply carries it)
            self.assembly.fail(request, error)
            return _failure(error)


def _failure(error: Exception) -> CaptureReply:
    """The reply for an error: only a SampleError is the sample's fault."""
    if isinstance(error, SampleError):
        return CaptureReply(error=str(error), fault="sample")
    if isinstance(error, Refusal):
        return CaptureReply(error=str(error), fault="setting")
    return CaptureReply(error=f"{type(error).__name__}: {error}", fault="engine")


class HostCopier:
    """Copies rows to the host: with CUDA to pinned memory, on a separate stream after the forward."""

    def __init__(self) -> None:
        self._stream: Any = None

    def host(self, rows: Tensor, scheduler: Any) -> Tensor:
        """The rows on the CPU. The copy is complete on return, so the engine may reuse its buffers."""
        if not rows.is_cuda:
            return rows
        self._stream = self._stream or torch.cuda.Stream(rows.device)
        forward = scheduler.forward_stream if scheduler.enable_overlap else torch.cuda.current_stream(rows.device)
        self._stream.wait_stream(forward)
        with torch.cuda.stream(self._stream):
            copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            copy.copy_(rows, non_blocking=True)
        self._stream.synchronize()
        return copy


def after_run_batch(result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """The hook: handles extend batches of generation; one rank of each tensor-parallel group writes."""
    output = getattr(result, "logits_output", None)
    if output is None or not batch.forward_mode.is_extend():
        return
    if not any((request.sampling_params.custom_params or {}).get(NAME) for request in batch.reqs):
        return
    try:
        parallel = _parallel()
        last, top = output.last_hidden_states, None
        if _specification().top_token and last is not None:
            # On all ranks: they divide the head.
            top = top_tokens(scheduler, parallel, last)
        # All ranks of an attention group have the same rows: the first one writes them.
        if parallel.attn_tp_rank != 0:
            return
        replies = _process_capture().take(scheduler, batch, output, top)
    except Exception as error:  # noqa: BLE001 (as above: nothing that goes wrong here may end the engine)
        failed = _failure(error).model_dump(mode="json")
        replies = [failed for _ in batch.reqs]
    output.customized_info = (output.customized_info or {}) | {NAME: replies}


@cache
def _specification() -> CaptureSpec:
    spec = capture_spec()
    assert spec is not None, "registered without a capture specification"
    return spec


@cache
def _process_capture() -> Capture:
    """Created at the first request, because plugins are also loaded in processes that never capture."""
    return Capture(_specification())


def _parallel() -> Any:
    """SGLang's `ParallelContext` of this process."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return get_parallel()


def mark_layers(_: None, model: Any, *_arguments: Any, **_named: Any) -> None:
    """Hook after a model is told to capture; engines that do not capture stay unchanged."""
    for layer in model.model.layers:
        setattr(layer, MARK, True)


def whole_output(
    original: Callable[..., tuple[Tensor, Tensor]],
    layer: Any,
    *arguments: Any,
    hidden_states: Tensor,
    residual: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Hook around a layer: returns its complete output `[T, H]` and a zero residual."""
    if not getattr(layer, MARK, False):
        return original(layer, *arguments, hidden_states=hidden_states, residual=residual, **named)
    if residual is not None:
        hidden_states = hidden_states.clone()
    output, residual = original(layer, *arguments, hidden_states=hidden_states, residual=residual, **named)
    whole = output + residual
    return whole, torch.zeros_like(whole)


def register() -> None:
    """Entry point. Without a capture specification only Gemma 3 is patched, for SGLang's own drafts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(GEMMA3_CAPTURE, mark_layers, HookType.AFTER)
    HookRegistry.register(GEMMA3_LAYER, whole_output, HookType.AROUND)
    if capture_spec() is not None:
        HookRegistry.register(RUN_BATCH, after_run_batch, HookType.AFTER)
