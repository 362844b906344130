"""How a trainer rank receives samples: through host memory, or straight into GPU memory (GPUDirect)."""

from typing import Protocol

import torch
from torch import Tensor

from infra.config import TransportConfig
from infra.records.data_path import ObjectRecord
from infra.refusal import Refusal
from infra.transport.base import TransferError, Transport, check_sum
from infra.transport.copying import block_sums
from infra.transport.mooncake.transport import MooncakeTransport
from models.targets.layout import HiddenStateLayout, as_bytes
from models.targets.model import HiddenStates

CHECKED = 16
"""One sample in this many that arrive in GPU memory is read back and compared with its checksums."""
GRAIN = 64 * 2**20


class Receiver(Protocol):
    """Makes room for a micro-batch and fills it, sample by sample."""

    words: str
    """How samples arrive and what is verified, for a person."""

    def empty(self, tokens: int) -> HiddenStates:
        """Room for `tokens` positions: `aux` `[T, K*H]` and `last` `[T, H]`."""
        ...

    def receive(self, record: ObjectRecord, into: HiddenStates) -> None:
        """Fill contiguous rows with one sample. Raises TransferError."""
        ...

    def close(self) -> None:
        """Nothing arrives any more."""
        ...


class HostReceiver:
    """Receives into host memory, pinned if there is a GPU; every byte is verified."""

    def __init__(self, transport: Transport, layout: HiddenStateLayout, why: str = ""):
        """`why`: the reason why GPU memory is not used although it was expected."""
        self._transport, self._layout = transport, layout
        self._pinned = torch.cuda.is_available()
        self.words = f"into {'pinned ' if self._pinned else ''}host memory, every checksum verified{why and f'; {why}'}"

    def empty(self, tokens: int) -> HiddenStates:
        return self._layout.empty(tokens, pinned=self._pinned)

    def receive(self, record: ObjectRecord, into: HiddenStates) -> None:
        self._transport.get(record, self._layout.views(into))

    def empty_parts(self, aux: int, last: int) -> HiddenStates:
        """Room for parts of samples: `aux` rows `[aux, K*H]` and others of `last` `[last, H]`."""
        return self._layout.empty(aux, last, pinned=self._pinned)

    def receive_part(self, record: ObjectRecord, name: str, first: int, into: Tensor) -> None:
        """Fill contiguous rows `[R, width]` of `aux` or `last` with a sample's, from position `first` on.

        Raises TransferError.
        """
        self._transport.get(record, {name: as_bytes(into)}, {name: first * into.shape[1] * into.itemsize})

    def close(self) -> None:
        """It holds nothing."""


class DeviceReceiver:
    """By RDMA into a registered piece of the GPU's memory and from there into the batch; the host sees no byte of it.

    Raises Refusal where the GPU's memory cannot be registered (the kernel module nvidia-peermem is what it takes).
    """

    def __init__(self, transport: MooncakeTransport, layout: HiddenStateLayout, device: torch.device):
        self._transport, self._layout, self._device = transport, layout, device
        self._arrived = 0
        self._landing = self._make(GRAIN)
        self.words = f"by GPUDirect into the memory of {device}, the checksums of one sample in {CHECKED} verified"

    def empty(self, tokens: int) -> HiddenStates:
        return self._layout.empty(tokens, device=self._device)

    def receive(self, record: ObjectRecord, into: HiddenStates) -> None:
        if record.nbytes > len(self._landing):
            self.close()
            self._landing = self._make(-(-record.nbytes // GRAIN) * GRAIN)
        self._transport.read(record, self._landing.data_ptr())
        start = 0
        for buffer in record.buffers:
            rows: Tensor = getattr(into, buffer.name)
            if rows.nbytes != buffer.nbytes:
                raise TransferError(f"{record.key}: {buffer.name} is {buffer.nbytes} bytes, expected {rows.nbytes}")
            part = self._landing[start : start + buffer.nbytes]
            if self._arrived % CHECKED == 0:
                check_sum(record, buffer, block_sums(as_bytes(part.cpu())), buffer.xxh3)
            rows.view(torch.uint8).view(-1).copy_(part)
            start += buffer.nbytes
        self._arrived += 1
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the next sample lands in the same place

    def close(self) -> None:
        """Unregister the buffer from Mooncake, which would otherwise write to its next owner's memory."""
        self._transport.unregister(self._landing.data_ptr())

    def _make(self, nbytes: int) -> Tensor:
        landing = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._transport.register(landing.data_ptr(), nbytes)
        return landing


def open_receiver(transport: Transport, config: TransportConfig, layout: HiddenStateLayout) -> Receiver:
    """What `transport.receive` asks for. Raises Refusal, with the remedy, for a GPU that is wanted in vain."""
    if config.receive == "host":
        return HostReceiver(transport, layout)
    if isinstance(transport, MooncakeTransport) and transport.protocol == "rdma" and torch.cuda.is_available():
        try:
            return DeviceReceiver(transport, layout, torch.device("cuda", torch.cuda.current_device()))
        except Refusal as error:
            if config.receive == "device":
                raise
            return HostReceiver(transport, layout, f"not by GPUDirect: {error}")
    elif config.receive == "device":
        raise Refusal(
            "transport.receive=device needs transport.kind=mooncake, an RDMA device and a GPU on the trainer's machine "
            "(`draftsmith doctor` lists them): set transport.receive=auto"
        )
    return HostReceiver(transport, layout)
