"""How a trainer rank receives its samples: through host memory, or straight into GPU memory (GPUDirect)."""

import threading
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from infra.config import TransportConfig
from infra.ledger.ledger import Ledger
from infra.records.data_path import ObjectRecord, PlannedSample, StepPlan
from infra.refusal import Refusal
from infra.transport.base import TransferError, Transport, block_sums, check_sum
from infra.transport.mooncake.environment import INSTALL, carries_gpu_memory
from infra.transport.mooncake.transport import MooncakeTransport
from models.drafts.base import PackedSamples
from models.drafts.context import ContextShare
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout, as_bytes
from models.training.control import Control
from models.training.progress import StreamTimes
from models.training.recapture import Recapture

CHECKED = 16
"""One sample in this many that arrive in GPU memory is read back and compared with its checksums."""
GRAIN = 64 * 2**20


class HostReceiver:
    """Receives into host memory, pinned if there is a GPU; every byte is verified."""

    def __init__(self, transport: Transport, layout: HiddenStateLayout, why: str = ""):
        """`why`: the reason why GPU memory is not used although it was expected."""
        self._transport, self._layout = transport, layout
        self._pinned = torch.cuda.is_available()
        # How samples arrive and what is verified, for a person.
        self.words = f"into {'pinned ' if self._pinned else ''}host memory, every checksum verified{why and f'; {why}'}"

    def empty(self, tokens: int, last: int | None = None) -> HiddenStates:
        """Room for a micro-batch of `tokens` positions: `aux` `[T, K*H]` and `last` `[T, H]`, or `last` `[L, H]`."""
        return self._layout.empty(tokens, last, pinned=self._pinned)

    def receive(self, record: ObjectRecord, into: HiddenStates) -> None:
        """Fill contiguous rows with one sample. Raises TransferError."""
        self._transport.get(record, self._layout.views(into))

    def receive_part(self, record: ObjectRecord, name: str, first: int, into: Tensor) -> None:
        """Fill contiguous rows `[R, ...]` of one of the hidden states with a sample's, from position `first` on.

        Raises TransferError.
        """
        self._transport.get(record, {name: as_bytes(into)}, {name: first * into[0].nbytes})

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
        """See `HostReceiver.empty`; on the device."""
        return self._layout.empty(tokens, device=self._device)

    def receive(self, record: ObjectRecord, into: HiddenStates) -> None:
        """See `HostReceiver.receive`."""
        if record.nbytes > len(self._landing):
            self.close()
            self._landing = self._make(-(-record.nbytes // GRAIN) * GRAIN)
        # The buffers one after the other; nothing is verified yet.
        self._transport.client.get(record.key, self._landing.data_ptr(), record.nbytes)
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
        self._transport.client.unregister(self._landing.data_ptr())

    def _make(self, nbytes: int) -> Tensor:
        landing = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._transport.client.register(landing.data_ptr(), nbytes)
        return landing


Receiver = HostReceiver | DeviceReceiver


def open_receiver(transport: Transport, config: TransportConfig, layout: HiddenStateLayout) -> Receiver:
    """What `transport.receive` asks for. Raises Refusal, with the remedy, for a GPU that is wanted in vain."""
    if config.receive == "host":
        return HostReceiver(transport, layout)
    if isinstance(transport, MooncakeTransport) and transport.protocol == "rdma" and torch.cuda.is_available():
        try:
            if not carries_gpu_memory():
                raise Refusal(f"Mooncake's build for CUDA 13 is not installed: `make GPUDIRECT=1`, or {INSTALL}")
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


class Fetcher:
    """A rank's part of a planned step: copied out of the transport into packed samples, and deleted there.

    Args:
        run: the run.
        control: this rank's place.
        ledger: where samples are released.
        incarnation: of this trainer.
        reach: positions after a row of which it needs the target's last states; asked where ranks share samples.
        stop: set when nobody needs the samples any more.
    """

    def __init__(
        self,
        run: PreparedRun,
        control: Control,
        ledger: Ledger,
        incarnation: int,
        reach: int,
        *,
        stop: threading.Event,
    ):
        self._control, self._ledger, self._incarnation, self._reach = control, ledger, incarnation, reach
        self._transport, self.samples = run.open_transport(), run.open_samples()
        self._media_ids = torch.tensor(run.target.media_ids)
        self._recapture = Recapture(run, self._transport, ledger, incarnation, stop)
        self._frees = run.sharing.mode != "alternate"
        """Otherwise a round keeps its objects until the checkpoint that holds it (infra.ledger.rounds)."""
        self._parts = HostReceiver(self._transport, run.layout) if control.context_size > 1 else None
        self._receiver = self._parts or open_receiver(self._transport, run.config.transport, run.layout)
        shared = f", a part on each of {control.context_size} ranks" if self._parts else ""
        self.words = self._receiver.words + shared
        self.close = self._receiver.close

    def fetch(self, plan: StepPlan, micro_batch: int, times: StreamTimes) -> PackedSamples | None:
        """This rank's samples of a micro-batch, or its part of those that its group shares. None: there are none."""
        control = self._control
        planned = plan.of(control.group, micro_batch)
        if not planned:
            return None
        lengths = tuple(p.tokens for p in planned)
        share = None
        if control.context_size > 1:
            share = ContextShare(lengths, control.context_size, control.context_rank, self._reach, control.context)
        started = time.monotonic()
        hidden = self._whole(planned, plan.step) if share is None else self._part(planned, plan.step, share)
        times.fetch_s += time.monotonic() - started
        control.wait_for_fetched()
        if self._frees:
            if control.context_rank == 0:
                for p in planned:
                    self._transport.delete(p.object.key)
            self._recapture.delete()
        texts = [self.samples.answered(p.sample, p.answer) for p in planned]
        tokens = torch.cat([t.tokens for t in texts])
        shown = None if hidden.embedded is None else torch.isin(tokens, self._media_ids)
        seen = shown is not None and bool(shown.any())
        return PackedSamples(
            tokens=tokens,
            loss_mask=torch.cat([t.loss_mask for t in texts]),
            aux=hidden.aux,
            last=hidden.last,
            # With GPUDirect it arrives on the device.
            top=None if hidden.top is None else hidden.top.cpu(),
            lengths=lengths,
            share=share,
            embedded=hidden.embedded if seen else None,
            shown=shown if seen else None,
            places=hidden.places if seen else None,
        )

    def release(self, plan: StepPlan) -> None:
        """Free the bytes of a step that all ranks have fetched, in one transaction however many ranks there are."""
        if self._frees:
            self._control.wait_for_plan()
            if self._control.rank == 0:
                self._ledger.release(self._incarnation, plan.epoch, *(sample.ordinal for sample in plan.samples))

    def _whole(self, planned: Sequence[PlannedSample], step: int) -> HiddenStates:
        hidden, start = self._receiver.empty(sum(p.tokens for p in planned)), 0
        for p in planned:
            rows = slice(start, start + p.tokens)
            self._recapture.read(p, step, partial(self._receiver.receive, into=hidden.rows(rows)))
            start += p.tokens
        return hidden

    def _part(self, planned: Sequence[PlannedSample], step: int, share: ContextShare) -> HiddenStates:
        parts = self._parts
        assert parts is not None
        hidden = parts.empty(*(sum(run.rows for run in runs) for runs in (share.runs, share.states)))
        for name, into in hidden.named().items():
            start = 0
            for run in share.runs if name in ("aux", "places") else share.states:
                place = into[start : start + run.rows]
                read = partial(parts.receive_part, name=name, first=run.start, into=place)
                self._recapture.read(planned[run.sample], step, read)
                start += run.rows
        return hidden
