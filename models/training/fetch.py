"""A rank's part of a planned step: out of the transport, into packed samples."""

import time
from collections.abc import Sequence

import torch

from infra.ledger.ledger import Ledger
from infra.records.data_path import PlannedSample, StepPlan
from models.drafts.base import PackedSamples
from models.drafts.context import ContextShare
from models.run import PreparedRun
from models.targets.model import HiddenStates
from models.training.control import Control
from models.training.receive import HostReceiver, open_receiver


class Fetcher:
    """Copies samples out of the transport and frees their bytes.

    Args:
        run: the run.
        control: this rank's place.
        ledger: where samples are released.
        incarnation: of this trainer.
        reach: positions behind a row of which it needs the target's last states; asked where ranks share samples.
    """

    def __init__(self, run: PreparedRun, control: Control, ledger: Ledger, incarnation: int, reach: int):
        self._control, self._ledger, self._incarnation, self._reach = control, ledger, incarnation, reach
        self._samples, self._transport = run.open_samples(), run.open_transport()
        self._parts = HostReceiver(self._transport, run.layout) if control.context_size > 1 else None
        self._receiver = self._parts or open_receiver(self._transport, run.config.transport, run.layout)
        self.fetch_s = 0.0
        """Seconds spent copying, in the background."""

    @property
    def words(self) -> str:
        """How samples arrive and what is verified, for a person."""
        size = self._control.context_size
        return self._receiver.words + (f", a part on each of {size} ranks" if size > 1 else "")

    def fetch(self, plan: StepPlan, micro_batch: int) -> PackedSamples | None:
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
        hidden = self._whole(planned) if share is None else self._part(planned, share)
        self.fetch_s += time.monotonic() - started
        control.wait_for_fetched()
        if control.context_rank == 0:
            for p in planned:
                self._transport.delete(p.object.key)
            self._ledger.release(self._incarnation, plan.epoch, *(p.ordinal for p in planned))
        texts = [self._samples[p.sample] for p in planned]
        return PackedSamples(
            tokens=torch.cat([t.tokens for t in texts]),
            loss_mask=torch.cat([t.loss_mask for t in texts]),
            aux=hidden.aux,
            last=hidden.last,
            lengths=lengths,
            share=share,
        )

    def _whole(self, planned: Sequence[PlannedSample]) -> HiddenStates:
        hidden, start = self._receiver.empty(sum(p.tokens for p in planned)), 0
        for p in planned:
            rows = slice(start, start + p.tokens)
            self._receiver.receive(p.object, HiddenStates(hidden.aux[rows], hidden.last[rows]))
            start += p.tokens
        return hidden

    def _part(self, planned: Sequence[PlannedSample], share: ContextShare) -> HiddenStates:
        assert self._parts is not None
        hidden = self._parts.empty_parts(*(sum(run.rows for run in runs) for runs in (share.runs, share.states)))
        for name, runs, into in (("aux", share.runs, hidden.aux), ("last", share.states, hidden.last)):
            start = 0
            for run in runs:
                rows = into[start : start + run.rows]
                self._parts.receive_part(planned[run.sample].object, name, run.start, rows)
                start += run.rows
        return hidden

    def close(self) -> None:
        """Nothing arrives any more."""
        self._receiver.close()
