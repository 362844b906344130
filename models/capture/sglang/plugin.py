"""SGLang plugin that writes the hidden states of Draftsmith's requests to the transport, in the scheduler processes.

Entry point group `sglang.srt.plugins`. With `--enable-return-aux-hidden-states` the engine keeps for every row of a
batch, which are those of prompts in a prefill and one for each request in a step of decoding,

    logits_output.hidden_states       [rows, K*H]   outputs of the chosen layers
    logits_output.last_hidden_states  [rows, H]     after the final norm
    logits_output.mm_input_embeds     [rows, H]     what the first layer reads, of batches with images

A request is captured if `sampling_params.custom_params` has an object's key under "draftsmith"; the answer's
`meta_info` then has a `CaptureReply` under the same name. Other requests are not touched. The object has a row for
every token that was read: for `max_new_tokens=1` those of the prompt, else also those of the answer without its last
one, which nothing read. A request that is retracted (the engine's memory was full) is computed again from its first
token, and captured again. The engine does not wait:

    scheduler  after run_batch: finite flags on the device, copies behind an event       host_copies
               stream_output: a finished request's message is made and held             outbox
    writer     waits for the event, joins chunks, writes, gives the reply                writer, assembly
               the message leaves with the reply, whichever of both is later             outbox

Gemma 3 is patched so that its layers return their complete output. SGLang 0.5.23 captures what a decoder layer of it
returns, but that layer leaves the last residual addition to the next layer's norm, whose CUDA kernel then overwrites
the captured tensor in place (sgl-project/sglang#39286). Llama and Qwen add before they capture. The final norm does the
same to the last layer's output, so it is given a copy. A draft must read the same features in training and in service,
so the patch applies to every engine that captures, also for its own draft.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from infra.records.data_path import CaptureSpec
from infra.records.live import rank_socket
from infra.refusal import Refusal
from infra.settings import capture_spec, live_socket
from models.capture.sglang.host_copies import HostCopies, HostCopy
from models.capture.sglang.live import KeyOf, Live
from models.capture.sglang.outbox import NAME, Outbox, PendingReply, is_pending, note, open_sender
from models.capture.sglang.top_tokens import top_tokens
from models.capture.sglang.writer import CapturedPrefill, CapturedStep, FinishedAnswer, RequestRows, Writer
from models.dtypes import DTYPES
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout

HOOKED = "0.5.23"
"""The version of SGLang whose internals are hooked here."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.__init__"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
STREAM_OUTPUT = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
EMBEDDED = "sglang.srt.managers.mm_utils.prepare_mm_inputs"
GEMMA3 = "sglang.srt.models.gemma3_causal."
GEMMA3_LAYER = GEMMA3 + "Gemma3DecoderLayer.forward"
GEMMA3_CAPTURE = GEMMA3 + "Gemma3ForCausalLM.set_eagle3_layers_to_capture"
MARK = "hands_over_its_whole_output"
DIVIDED_TEXTS = "its ranks divide the tokens of a text (context parallelism), and hidden states are those of one rank"


def named_key(request: Any) -> str | None:
    """Key of the object to write for a request of an engine of Draftsmith's own; None for requests of others."""
    return (request.sampling_params.custom_params or {}).get(NAME)


class Capture:
    """Captures the requests of one scheduler process.

    Args:
        spec: what the run wants.
        key: tells the run's requests.
        serves: whether the engine serves users too: it then waits for nothing, and outlives a broken writer.
    """

    def __init__(self, spec: CaptureSpec, key: KeyOf = named_key, serves: bool = False):
        self.key, self.serves = key, serves
        self._layout = HiddenStateLayout(
            spec.aux_count, spec.hidden_size, DTYPES[spec.dtype], spec.top_token, spec.embedded
        )
        self._copies = HostCopies(self._layout, waits=not serves)
        self._writer = Writer(spec, self._layout, self._copies, ends_server=not serves)
        self._unfinished: dict[str, Any] = {}

    def copy(self, scheduler: Any, output: Any, batch: Any) -> HostCopy | None:
        """Begin to copy what a batch computed to the host; None on ranks that write nothing."""
        if output.hidden_states is None or output.last_hidden_states is None:
            raise Refusal(
                "the engine kept no hidden states: start it with --enable-return-aux-hidden-states, or with a draft "
                "that reads the layers of target.aux_layer_ids"
            )
        parallel, top = _parallel(), None
        if parallel.attn_cp_size > 1:
            raise Refusal(f"{DIVIDED_TEXTS}: leave --attn-cp-size out of generator.sglang.arguments")
        if self._layout.top_token:
            # On all ranks: they divide the head.
            top = top_tokens(scheduler, parallel, output.last_hidden_states)
        if not _writes(parallel):
            return None
        aux = output.hidden_states
        if not self._layout.aux_count:
            aux = aux.new_empty(len(aux), 0)  # of the one layer that the engine had to name
        # Engines of Draftsmith's own have no graphs but those of decoding.
        hidden = HiddenStates(aux, output.last_hidden_states, top)
        if self._layout.embedded:
            # A batch without images looks its tokens up in the table, which the trainer has.
            given = output.mm_input_embeds
            embedded = torch.zeros_like(output.last_hidden_states) if given is None else given
            hidden = replace(hidden, embedded=embedded, places=_places(batch))
        return self._copies.start(hidden, scheduler, replayed=batch.forward_mode.is_decode() or self.serves)

    def submit(self, batch: Any, copy: HostCopy | Exception) -> list[PendingReply | None]:
        """Have a prefill written. Returns one reply per request, None if it is not captured or not complete yet."""
        ended = tuple(rid for rid, request in self._unfinished.items() if request.finished())
        parts, replies, offset = [], [], 0
        for request, count, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            rows, total = slice(offset, offset + count), len(request.origin_input_ids)
            offset += count
            key = self.key(request)
            if key is None:
                replies.append(None)
                continue
            answers = _answers(request)
            self._unfinished[request.rid] = request
            replies.append(PendingReply() if start + count == total and not answers else None)
            parts.append(RequestRows(request.rid, key, None if answers else total, start, rows, replies[-1]))
        for rid in (*ended, *(part.request for part in parts if part.reply)):
            self._unfinished.pop(rid, None)
        self._writer.put(CapturedPrefill(tuple(parts), copy, ended))
        return replies

    def step(self, batch: Any, copy: HostCopy | Exception) -> None:
        """Have a step of decoding written: the next row of every request."""
        rows = {request.rid: row for row, request in enumerate(batch.reqs) if request.rid in self._unfinished}
        self._writer.put(CapturedStep(rows, copy))

    def goes_on(self, request: Any) -> bool:
        """Whether a request is captured with its answer, and has not ended."""
        return request.rid in self._unfinished and _answers(request) and not request.finished()

    def finish(self, request: Any) -> PendingReply | None:
        """Have a request written that was captured with its answer, and has ended; None for any other."""
        if request.rid not in self._unfinished or not _answers(request) or not request.finished():
            return None
        if request.finished_reason.to_json()["type"] == "abort":
            return None  # it is dropped with the next batch
        del self._unfinished[request.rid]
        reply, key = PendingReply(), self.key(request)
        assert key is not None
        read = len(request.origin_input_ids) + len(request.output_ids) - 1
        self._writer.put(FinishedAnswer(request.rid, key, read, reply))
        return reply

    def close(self) -> None:
        """Write what was submitted, and end."""
        self._writer.close()


def after_run_batch(result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """The hook: handles prefills and steps of decoding; one rank of each tensor-parallel group writes.

    It waits for neither the forward nor the copy. An error fails the requests of this batch, never the engine.
    """
    output, mode, capture = getattr(result, "logits_output", None), batch.forward_mode, _capture()
    if output is None or capture is None or not (mode.is_extend() or (mode.is_decode() and not capture.serves)):
        return
    if not any(map(capture.key, batch.reqs)):
        return
    try:
        copy = capture.copy(scheduler, output, batch)
    except Exception as error:  # noqa: BLE001 (an exception here would end the engine; the replies carry it)
        copy = error if _writes(_parallel()) else None
    if copy is not None and mode.is_decode():
        capture.step(batch, copy)
    elif copy is not None:
        for request, reply in zip(batch.reqs, capture.submit(batch, copy), strict=True):
            if reply is not None:
                note(request, reply)


def hold_replies(
    original: Callable[..., None], streamer: Any, requests: list[Any], *arguments: Any, **named: Any
) -> None:
    """The hook around the engine's answers: those of captured requests leave when their objects are written."""
    capture = _capture()
    for request in requests:
        for live in _LIVE:
            live.offer(request)
        if capture is not None and (reply := capture.finish(request)) is not None:
            note(request, reply)
    # Parts of a captured answer wait too: its end leaves by another socket, and could arrive before them.
    own = [one for one in requests if not is_pending(one) and not (capture is not None and capture.goes_on(one))]
    original(streamer, own, *arguments, **named)
    for request in filter(is_pending, requests):
        _outbox(streamer.send_to_detokenizer).hold(original, streamer, request, *arguments, **named)


def _answers(request: Any) -> bool:
    """Whether a request is captured with its answer."""
    return request.sampling_params.max_new_tokens > 1


def _places(batch: Any) -> Tensor:
    """`[rows, 3]` int32, on the host: where a batch's rows stand in time, height and width."""
    found = []
    if batch.forward_mode.is_decode():
        # After an image's last part text goes on from its greatest place, which is less than its number of parts.
        for request, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            moved = getattr(request.multimodal_inputs, "mrope_position_delta", None)
            found.append(torch.full((1, 3), length - 1 + (0 if moved is None else int(moved))))
        return torch.cat(found).int()
    for request, count, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
        seen = getattr(request.multimodal_inputs, "mrope_positions", None)
        rows = torch.arange(start, start + count).expand(3, -1) if seen is None else seen[:, start : start + count]
        found.append(rows.T.cpu())
    return torch.cat(found).int()


def _writes(parallel: Any) -> bool:
    """All ranks of an attention group have the same rows: the first one writes them.

    With context parallelism, which is refused, the first rank of all that divide a text tells so.
    """
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


_LIVE: list[Live] = []
"""The listener of a scheduler that serves users, at most one."""


def _capture() -> Capture | None:
    """What captures for the run that has this engine, or that learns from it; None where none does."""
    if live_socket() is None:
        return _own_capture()
    attachment = _LIVE[0].attachment if _LIVE else None
    return None if attachment is None else attachment.capture


@cache
def _own_capture() -> Capture:
    """Created at the first request, because plugins are also loaded in processes that never capture."""
    spec = capture_spec()
    assert spec is not None, "registered without a capture specification"
    return Capture(spec)


def listen_for_runs(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """Hook after a scheduler is made: on every rank that writes, runs may begin to learn from it."""
    path, parallel = live_socket(), _parallel()
    if path is None or not _writes(parallel) or parallel.pp_rank:
        return
    try:
        place = rank_socket(path, parallel.dp_rank or parallel.attn_dp_rank)
        make, obstacle = partial(Capture, serves=True), _obstacle_to_live(scheduler, parallel)
        _LIVE.append(Live(place, make, scheduler.is_fully_idle, obstacle, parallel.num_dp_ranks))
    except Refusal as refusal:
        # Users are served all the same.
        print(f"draftsmith: nothing is learned from this server: {refusal}", flush=True)


def _obstacle_to_live(scheduler: Any, parallel: Any) -> str:
    """Why no run can learn from this server; empty: it can."""
    if parallel.nnodes > 1:
        return "its ranks are on several machines, and a run reaches those of one: start a server on each"
    if parallel.pp_size > 1:
        return "its layers are divided among pipeline ranks, and hidden states are those of one rank"
    if parallel.attn_cp_size > 1:
        return f"{DIVIDED_TEXTS}: start it without --attn-cp-size"
    if scheduler.disaggregation_mode.value != "null":
        return "it prefills on other servers than it decodes, and neither has a request's whole text"
    return _obstacle_to_capture(scheduler)


def _obstacle_to_capture(scheduler: Any) -> str:
    """Why a server keeps no hidden states of the target's layers; empty: it keeps them."""
    algorithm, runner = scheduler.spec_algorithm, getattr(scheduler.tp_worker, "model_runner", None)
    aux = getattr(runner, "spec_aux_config", None)
    captures = aux is not None and (aux.eagle_use_aux_hidden_state or aux.dflash_use_aux_hidden_state)
    # The workers of DFlash and DSpark drop what the model captured before `run_batch` returns. Of the others only
    # EAGLE-3's has the model capture, and not for each of its drafts.
    if captures and not algorithm.is_dflash_family():
        return ""
    remedy = "without a draft and with --enable-return-aux-hidden-states as in docs/live.md"
    if algorithm.is_none():
        return f"it keeps no hidden states: start it with an EAGLE-3 draft, or {remedy}"
    # SGLang renames NEXTN, its other name of MTP, to EAGLE.
    name = "EAGLE (NEXTN, MTP)" if algorithm.name == "EAGLE" else algorithm.name
    return (
        f"it speculates with {name}, and SGLang {HOOKED} keeps no hidden states of the target's layers with this "
        f"draft: start it with an EAGLE-3 draft that reads them, or {remedy}, or train on prompts of its request log "
        "(docs/drift.md)"
    )


def keep_last(_result: None, processor: Any, *_: Any, **__: Any) -> None:
    """Hook after a logits processor is made: an engine with a draft keeps the output after the final norm too.

    It has computed it, and holds it no longer than the draft's layers, which it keeps for the draft.
    """
    processor.keep_last_hidden_states = True


@cache
def _outbox(sender: Any) -> Outbox:
    return Outbox(open_sender(sender))


def _parallel() -> Any:
    """SGLang's `ParallelContext` of this process."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return get_parallel()


def keep_embedded(original: Callable[..., Tensor | None], *arguments: Any, **named: Any) -> Tensor | None:
    """Hook around what makes the embeddings of a batch with images: the first layer's norm may overwrite them."""
    found = original(*arguments, **named)
    (batch,) = (one for one in (*arguments, *named.values()) if hasattr(one, "mm_input_embeds"))
    if batch.mm_input_embeds is not None:
        batch.mm_input_embeds = batch.mm_input_embeds.clone()
    return found


def mark_layers(_: None, model: Any, *_arguments: Any, **_named: Any) -> None:
    """Hook after a model is told to capture; engines that do not capture stay unchanged."""
    body = model.model
    for layer in body.layers:
        setattr(layer, MARK, True)
    # SGLang names a layer by the one that reads its output, and the last one's output is read by the final norm.
    if len(body.layers) in body.layers_to_capture and not getattr(body.norm, MARK, False):
        setattr(body.norm, MARK, True)
        body.norm.register_forward_pre_hook(keep_norm_input)


def keep_norm_input(_norm: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook before the final norm: with a residual its CUDA kernel overwrites its input, the last layer's output."""
    hidden, *others = arguments
    return (hidden.clone(), *others) if others and others[0] is not None else arguments


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
    """Entry point. In engines from which no run learns only Gemma 3 is patched, for SGLang's own drafts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(GEMMA3_CAPTURE, mark_layers, HookType.AFTER)
    HookRegistry.register(GEMMA3_LAYER, whole_output, HookType.AROUND)
    spec, lives = capture_spec(), live_socket() is not None
    if lives and (found := version("sglang")) != HOOKED:
        # Users are served all the same: what another version does with these hooks is unknown.
        said = f"nothing is learned from this server: the plugin needs SGLang {HOOKED}, not {found}"
        print(f"draftsmith: {said}", flush=True)
        lives = False
    if lives:
        HookRegistry.register(SCHEDULER, listen_for_runs, HookType.AFTER)
        HookRegistry.register(LOGITS, keep_last, HookType.AFTER)
    if spec is not None or lives:
        HookRegistry.register(RUN_BATCH, after_run_batch, HookType.AFTER)
        HookRegistry.register(STREAM_OUTPUT, hold_replies, HookType.AROUND)
    if spec is not None and spec.embedded:
        HookRegistry.register(EMBEDDED, keep_embedded, HookType.AROUND)
