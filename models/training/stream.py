"""The stream of captured samples into training: rank 0 plans steps, every rank fetches its part ahead of time.

A background worker plans and fetches at most `prefetch_steps` steps ahead, so the trainer
waits only when generators or transport are slower than the draft step.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from infra.data_plane.watch import StallError, blame
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import EndOfEpoch, Resume, plan_step
from infra.records.data_path import StepPlan
from models.drafts.base import PackedSamples, supervised_positions
from models.run import PreparedRun
from models.targets.layout import HiddenStateLayout
from models.targets.model import HiddenStates
from models.training.control import Control
from models.training.progress import StreamTimes
from models.training.receive import Fetcher

POLL_S = 0.02


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of an optimizer step on this rank."""

    step: int
    index: int
    last_of_step: bool
    samples: PackedSamples | None
    """None if there is nothing to train here; the rank then joins with weight 0."""
    total: int
    """Supervised positions of the whole step, over all ranks and micro-batches."""
    step_tokens: int
    """Tokens of the whole step."""
    layout: HiddenStateLayout | None = None
    """How the samples' hidden states are stored. None: as they are trained on."""
    epoch: int = 0
    """Of all samples of the step."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same with its hidden states on `device`, copied on a separate stream while the GPU computes.

        Hidden states stored in float8 arrive so, and are restored there.
        """
        if self.samples is None:
            return self
        if device.type == "cpu":
            return self._restored(self.samples)
        copying, computing, marks = _copy_stream(device), torch.cuda.current_stream(device), _marks(device)
        # Micro-batches that wait on the GPU take its memory: at most one waits while another is computed.
        marks.append(computing.record_event())
        if len(marks) > 1:
            marks.popleft().synchronize()
        with torch.cuda.stream(copying):
            rows = self._rows(self.samples).named()
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in rows.items()}
        computing.wait_stream(copying)
        for tensor in moved.values():
            tensor.record_stream(computing)
        return self._restored(replace(self.samples, **moved))

    def _restored(self, samples: PackedSamples) -> "MicroBatch":
        rows = self._rows(samples)
        if self.layout is not None:
            rows = self.layout.restored(rows)
        restored = {"aux": rows.features, "last": rows.last, "embedded": rows.embedded, "places": rows.places}
        return replace(self, samples=replace(samples, **restored))

    @staticmethod
    def _rows(samples: PackedSamples) -> HiddenStates:
        """What the GPU needs of them."""
        return HiddenStates(samples.aux, samples.last, embedded=samples.embedded, places=samples.places)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _marks(_device: torch.device) -> deque[Any]:
    """Where the computation stood at the latest copies."""
    return deque()


class StepStream:
    """Iterates over this rank's micro-batches, step after step, until the last epoch or `max_steps` ends.

    `reach`: see Fetcher.
    """

    def __init__(self, run: PreparedRun, control: Control, ledger: Ledger, resume: Resume, reach: int):
        self.run, self.control, self.ledger, self.settings = run, control, ledger, run.config.training
        self.incarnation, self.epoch = resume.incarnation, resume.epoch
        self._stop = threading.Event()
        self.fetcher = Fetcher(run, control, ledger, resume.incarnation, reach, stop=self._stop)
        self.step = self.training_step = 1 + (resume.checkpoint.step if resume.checkpoint else 0)
        """The step to plan next, and the one that the optimizer works on meanwhile."""
        self.times = StreamTimes()
        self.finished = False
        """Whether rank 0 has planned the run's last step; else the stream ended because generators have their turn."""
        self._alternates = run.sharing.mode == "alternate"
        self._opened: set[int] = set()

    def __iter__(self) -> Iterator[MicroBatch]:
        # One worker: steps are planned and fetched in order, and a future carries its error to the training thread.
        with ThreadPoolExecutor(1, "stream") as worker:
            ahead = deque(worker.submit(self._next_step) for _ in range(self.settings.prefetch_steps + 1))
            try:
                while (batches := self._wait_for(ahead.popleft())) is not None:
                    ahead.append(worker.submit(self._next_step))
                    self.training_step = batches[0].step
                    yield from batches
            finally:
                self._stop.set()
                worker.shutdown(cancel_futures=True)
                self.fetcher.close()

    def _wait_for(self, future: Future[list[MicroBatch] | None]) -> list[MicroBatch] | None:
        started = time.monotonic()
        # The worker gives up after stall_s and says why; this bound is for a worker that hangs.
        batches = future.result(timeout=2 * self.run.config.stall_s)
        self.times.waited_s += time.monotonic() - started
        return batches

    def _next_step(self) -> list[MicroBatch] | None:
        plan = self.control.decide(self._plan() if self.control.rank == 0 else None, StepPlan)
        if plan is None:
            return None
        self.step = plan.step + 1
        samples = self.fetcher.samples
        masks = [samples.answered(planned.sample, planned.answer).loss_mask for planned in plan.samples]
        total = sum(len(supervised_positions(mask, (len(mask),))) for mask in masks)
        batches = [
            MicroBatch(
                step=plan.step,
                index=index,
                last_of_step=index == plan.micro_batches - 1,
                samples=self.fetcher.fetch(plan, index, self.times),
                total=max(total, 1),
                step_tokens=sum(planned.tokens for planned in plan.samples),
                layout=self.run.layout,
                epoch=plan.epoch,
            )
            for index in range(plan.micro_batches)
        ]
        self.fetcher.release(plan)
        return batches

    def _plan(self) -> StepPlan | None:
        """The next step's plan, opening epochs as needed; None at the end of the run, or of the trainer's turn."""
        settings, deadline = self.settings, time.monotonic() + self.run.config.stall_s
        while not self._stop.is_set():
            if self.epoch >= settings.epochs or (settings.max_steps is not None and self.step > settings.max_steps):
                self.finished = True
                break
            if self.epoch not in self._opened:
                self.ledger.open_epoch(self.incarnation, self.epoch, self.run.epoch_slots(self.epoch))
                self._opened.add(self.epoch)
            answer = plan_step(
                self.ledger,
                self.incarnation,
                self.epoch,
                self.step,
                ranks=self.control.groups,
                micro_batches=settings.micro_batches,
                samples_per_step=settings.samples_per_step,
                current_step=self.training_step,
            )
            if isinstance(answer, StepPlan):
                return answer
            if isinstance(answer, EndOfEpoch):
                self.epoch += 1
            elif self._alternates:
                break
            elif time.monotonic() > deadline:
                needs = f"step {answer.step} needs {answer.needed} samples and has {answer.ready}"
                raise StallError(f"no progress for {self.run.config.stall_s:g} s: {needs}; {blame(self.ledger)}")
            else:
                time.sleep(POLL_S)
        return None
