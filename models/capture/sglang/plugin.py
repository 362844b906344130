"""Capture inside SGLang: hands the hidden states of our requests to the transport. Runs in the scheduler processes.

An SGLang plugin (entry point group `sglang.srt.plugins`): a hook after `Scheduler.run_batch`, which sees what a forward
computed before any reply leaves. `--enable-return-aux-hidden-states` makes the engine keep, for every row of a prefill,

    logits_output.hidden_states       [rows, K*H]   outputs of the chosen layers
    logits_output.last_hidden_states  [rows, H]     after the final norm

A request is ours when `sampling_params.custom_params` holds an object's key under "draftsmith"; the answer's
`meta_info` then holds a `CaptureReply` under the same name. All other requests pass untouched.
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
"""Of the request's parameter, and of the reply."""


class Capture:
    """One scheduler's capture: chunks, copies, transport."""

    def __init__(self, spec: CaptureSpec):
        self.layout = HiddenStateLayout(spec.aux_count, spec.hidden_size, DTYPES[spec.dtype])
        self.transport = open_transport(spec.transport, RunFolder(spec.run))
        self.assembly = Assembly()
        self.copier = HostCopier()

    def take(self, scheduler: Any, batch: Any, output: Any) -> list[dict[str, Any] | None]:
        """Write the prompts that this prefill completed; a reply per request of the batch, None for those of others."""
        self.assembly.drop_finished()
        replies: list[dict[str, Any] | None] = []
        offset = 0
        for request, count, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            rows = slice(offset, offset + count)
            offset += count
            key = (request.sampling_params.custom_params or {}).get(NAME)
            # A retracted request comes back with its first answer tokens behind the prompt: it was captured before.
            if key is None or request.output_ids:
                replies.append(None)
                continue
            reply = self._take_one(scheduler, request, key, start, output, rows)
            replies.append(None if reply is None else reply.model_dump(mode="json"))
        return replies

    def _take_one(
        self, scheduler: Any, request: Any, key: str, start: int, output: Any, rows: slice
    ) -> CaptureReply | None:
        """None: more chunks to come. What goes wrong fails this request alone, never the engine."""
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
    """The reply for what went wrong: only a SampleError is the sample's fault."""
    if isinstance(error, SampleError):
        return CaptureReply(error=str(error), fault="sample")
    if isinstance(error, Refusal):
        return CaptureReply(error=str(error), fault="setting")
    return CaptureReply(error=f"{type(error).__name__}: {error}", fault="engine")


class HostCopier:
    """Copies rows to the host: on CUDA to pinned memory on a stream of its own, behind the forward's."""

    def __init__(self) -> None:
        self._stream: Any = None

    def host(self, rows: Tensor, scheduler: Any) -> Tensor:
        """The rows on the CPU; when this returns they are there, and the engine may use its buffers again."""
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
    """The hook. Only extend batches of generation, and of each tensor-parallel group only one rank."""
    output = getattr(result, "logits_output", None)
    if output is None or not batch.forward_mode.is_extend() or not _is_writer():
        return
    if not any((request.sampling_params.custom_params or {}).get(NAME) for request in batch.reqs):
        return
    try:
        replies = _this_process_s_capture().take(scheduler, batch, output)
    except Exception as error:  # noqa: BLE001 (as above: nothing that goes wrong here may end the engine)
        failed = _failure(error).model_dump(mode="json")
        replies = [failed for _ in batch.reqs]
    output.customized_info = (output.customized_info or {}) | {NAME: replies}


@cache
def _this_process_s_capture() -> Capture:
    """Made at the first request: plugins load in processes too that never capture."""
    spec = capture_spec()
    assert spec is not None, "registered without a capture specification"
    return Capture(spec)


def _is_writer() -> bool:
    """Rows are the same on all ranks of an attention group: its first one writes."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return get_parallel().attn_tp_rank == 0


def register() -> None:
    """Entry point. Without a capture specification it only mends what SGLang gives its own drafts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(gemma3.CAPTURE, gemma3.mark_layers, HookType.AFTER)
    HookRegistry.register(gemma3.LAYER, gemma3.whole_output, HookType.AROUND)
    if capture_spec() is not None:
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", after_run_batch, HookType.AFTER)
