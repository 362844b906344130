"""SGLang plugin that writes the hidden states of Draftsmith's requests to the transport, in the scheduler processes.

Its hook after `Scheduler.run_batch` (entry point group `sglang.srt.plugins`) runs before any reply is sent. With
`--enable-return-aux-hidden-states` the engine keeps for every row of a prefill

    logits_output.hidden_states       [rows, K*H]   outputs of the chosen layers
    logits_output.last_hidden_states  [rows, H]     after the final norm

A request is captured if `sampling_params.custom_params` has an object's key under "draftsmith"; the answer's
`meta_info` then has a `CaptureReply` under the same name. Other requests are not touched.
"""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from infra.files.run_folder import RunFolder
from infra.records.data_path import CaptureReply, CaptureSpec
from infra.refusal import Refusal
from infra.settings import capture_spec
from infra.transport.choice import open_transport
from models.capture.sglang import gemma3
from models.capture.sglang.assembly import Assembly
from models.dtypes import DTYPES
from models.targets.layout import HiddenStateLayout, SampleError
from models.targets.model import HiddenStates

NAME = "draftsmith"
"""Name of the request parameter and of the reply."""


class Capture:
    """Captures the requests of one scheduler process."""

    def __init__(self, spec: CaptureSpec):
        self.layout = HiddenStateLayout(spec.aux_count, spec.hidden_size, DTYPES[spec.dtype])
        self.transport = open_transport(spec.transport, RunFolder(spec.run))
        self.assembly = Assembly()
        self.copier = HostCopier()

    def take(self, scheduler: Any, batch: Any, output: Any) -> list[dict[str, Any] | None]:
        """Write the prompts that this prefill completed. Returns one reply per request, None if not captured."""
        self.assembly.drop_finished()
        replies: list[dict[str, Any] | None] = []
        offset = 0
        for request, count, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            rows = slice(offset, offset + count)
            offset += count
            key = (request.sampling_params.custom_params or {}).get(NAME)
            # A retracted request returns with answer tokens after its prompt: it was already captured.
            if key is None or request.output_ids:
                replies.append(None)
                continue
            reply = self._take_one(scheduler, request, key, start, output, rows)
            replies.append(None if reply is None else reply.model_dump(mode="json"))
        return replies

    def _take_one(
        self, scheduler: Any, request: Any, key: str, start: int, output: Any, rows: slice
    ) -> CaptureReply | None:
        """The reply, or None before the last chunk. An error fails only this request, never the engine."""
        try:
            aux, last = output.hidden_states, output.last_hidden_states
            if aux is None or last is None:
                raise Refusal("the engine kept no hidden states: start it with --enable-return-aux-hidden-states")
            hidden = HiddenStates(
                aux=self.copier.host(aux[rows], scheduler), last=self.copier.host(last[rows], scheduler)
            )
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
    """The hook: handles extend batches of generation, on one rank of each tensor-parallel group."""
    output = getattr(result, "logits_output", None)
    if output is None or not batch.forward_mode.is_extend() or not _is_writer():
        return
    if not any((request.sampling_params.custom_params or {}).get(NAME) for request in batch.reqs):
        return
    try:
        replies = _process_capture().take(scheduler, batch, output)
    except Exception as error:  # noqa: BLE001 (as above: nothing that goes wrong here may end the engine)
        failed = _failure(error).model_dump(mode="json")
        replies = [failed for _ in batch.reqs]
    output.customized_info = (output.customized_info or {}) | {NAME: replies}


@cache
def _process_capture() -> Capture:
    """Created at the first request, because plugins are also loaded in processes that never capture."""
    spec = capture_spec()
    assert spec is not None, "registered without a capture specification"
    return Capture(spec)


def _is_writer() -> bool:
    """All ranks of an attention group have the same rows: the first one writes them."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return get_parallel().attn_tp_rank == 0


def register() -> None:
    """Entry point. Without a capture specification only Gemma 3 is patched, for SGLang's own drafts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(gemma3.CAPTURE, gemma3.mark_layers, HookType.AFTER)
    HookRegistry.register(gemma3.LAYER, gemma3.whole_output, HookType.AROUND)
    if capture_spec() is not None:
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", after_run_batch, HookType.AFTER)
