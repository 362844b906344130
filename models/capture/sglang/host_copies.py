"""Copies of a batch's hidden states in host memory, for which the engine does not wait."""

import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout, finite_rows

BUFFERS = 4
"""Prefills between capture and transport: one that runs, one that is queued after it, two that are being written."""
BUFFER_S = 120.0
"""The engine's longest wait for the writer. SGLang's watchdog ends a server that stands still for 300 s."""
COPY_S = 240.0
"""Longest wait for a prefill and its copy to the host."""
POLL_S = 0.001
ALIGNMENT = 64


@dataclass
class HostCopy:
    """A prefill's rows on the host, in their order. Their values are there once `wait` returns."""

    hidden: HiddenStates
    """`[rows, ...]` views of `buffer`, or on a CPU the engine's own tensors."""
    finite: Tensor
    """`[2, rows]` bool: see finite_rows."""
    buffer: Tensor
    copied: Any = None
    """Event after the last copy; None where nothing was copied."""
    sources: tuple[Tensor, ...] = field(default=(), repr=False)
    """What is being copied: the allocator would reuse its memory."""

    def wait(self) -> None:
        """Wait for the copy. Raises TimeoutError: the buffer may not be used again then."""
        if self.copied is None:
            return
        deadline = time.monotonic() + COPY_S
        # A new thread is on GPU 0, and would begin to use it.
        with torch.cuda.device_of(self.sources[0]):
            while not self.copied.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"hidden states were not copied to the host within {COPY_S:g} s")
                time.sleep(POLL_S)
            self.sources = ()

    def kept(self) -> HiddenStates:
        """The rows, to be kept after the buffer is used again."""
        if self.copied is None:
            return self.hidden
        return HiddenStates(**{name: rows.clone() for name, rows in self.hidden.named().items()})


class HostCopies:
    """Makes copies in a ring of buffers, on a stream of its own. A full ring holds the engine back, if it `waits`.

    Buffers grow to the largest prefill; page-locked memory is slow to allocate, so they are kept. On a CPU nothing is
    copied: the engine allocates new tensors for every batch, which live as long as they are referred to.
    """

    def __init__(self, layout: HiddenStateLayout, waits: bool = True):
        self._layout, self._stream, self._waits = layout, None, waits
        self._free: Queue[Tensor] = Queue()
        for _ in range(BUFFERS):
            self._free.put(torch.empty(0, dtype=torch.uint8))

    def start(self, hidden: HiddenStates, scheduler: Any, replayed: bool = False) -> HostCopy:
        """Begin to copy the rows that SGLang's `scheduler` has just launched. Raises TimeoutError for a full ring.

        `replayed`: whether they may stand in the buffers of a graph, which its next replay overwrites. They are then
        copied on the device first, before the engine can launch that.
        """
        try:
            buffer = self._free.get(block=self._waits, timeout=BUFFER_S)
        except Empty:
            within = f"within {BUFFER_S:g} s" if self._waits else "yet"
            raise TimeoutError(f"no earlier prefill was written to the transport {within}") from None
        with ExitStack() as undo:
            undo.callback(self._free.put, buffer)
            on_host = hidden.last.device.type == "cpu"
            if replayed and not on_host:
                with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
                    hidden = HiddenStates(**{name: rows.clone() for name, rows in hidden.named().items()})
            copy = HostCopy(hidden, finite_rows(hidden), buffer) if on_host else self._copy(hidden, scheduler, buffer)
            undo.pop_all()
        return copy

    def _copy(self, hidden: HiddenStates, scheduler: Any, buffer: Tensor) -> HostCopy:
        device = scheduler.device_module
        self._stream = self._stream or device.Stream()
        self._stream.wait_stream(scheduler.forward_stream if scheduler.enable_overlap else device.current_stream())
        with device.stream(self._stream):
            sources = self._layout.stored(hidden).named() | {"finite": finite_rows(hidden)}
            nbytes = sum(map(_aligned, sources.values()))
            if buffer.nbytes < nbytes:
                # A power of two, so that few prefills make it grow.
                pinned = hidden.last.is_cuda
                buffer = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=pinned)
            copies = _views(buffer, sources)
            for name, source in sources.items():
                copies[name].copy_(source, non_blocking=True)
            copied = device.Event()
            copied.record(self._stream)
        finite = copies.pop("finite")
        kept = (*hidden.named().values(), *sources.values())
        return HostCopy(HiddenStates(**copies), finite, buffer, copied, kept)

    def release(self, copy: HostCopy) -> None:
        """Use the buffer of a written copy again."""
        self._free.put(copy.buffer)


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _views(buffer: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of consecutive parts of `buffer`, shaped like the tensors."""
    views, start = {}, 0
    for name, tensor in tensors.items():
        views[name] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor)
    return views
