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

import torch

from infra.data_plane.bottleneck import StallError, blame
from infra.ledger.answers import EndOfEpoch, Resume, Wait
from infra.ledger.ledger import Ledger
from infra.records.data_path import StepPlan
from models.drafts.base import PackedSamples, supervised_positions
from models.run import PreparedRun
from models.training.control import Control
from models.training.fetch import Fetcher
from models.training.takeover import epoch_slots

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

    def to(self, device: torch.device) -> "MicroBatch":
        """The same with its tensors on `device`, copied on a separate stream while the GPU computes."""
        if self.samples is None or device.type == "cpu":
            return self
        copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
        with torch.cuda.stream(copying):
            names = ("tokens", "loss_mask", "aux", "last")
            moved = {name: getattr(self.samples, name).to(device, non_blocking=True) for name in names}
        computing.wait_stream(copying)
        for tensor in moved.values():
            tensor.record_stream(computing)
        return replace(self, samples=replace(self.samples, **moved))


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class StepStream:
    """Iterates over this rank's micro-batches, step after step, until the last epoch or `max_steps` ends.

    `reach`: see Fetcher.
    """

    def __init__(self, run: PreparedRun, control: Control, ledger: Ledger, resume: Resume, first_step: int, reach: int):
        self.run, self.control, self.ledger = run, control, ledger
        self.incarnation, self.epoch = resume.incarnation, resume.epoch
        self.settings = run.config.training
        self.samples = run.open_samples()
        self.fetcher = Fetcher(run, control, ledger, resume.incarnation, reach)
        self.step = first_step
        self.training_step = first_step
        """The step that the optimizer works on while later ones are planned."""
        self.waited_s = 0.0
        """Seconds in which the optimizer waited for a step."""
        self._opened: set[int] = set()
        self._stop = threading.Event()

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
        batches = future.result(timeout=2 * self.settings.stall_s)
        self.waited_s += time.monotonic() - started
        return batches

    def _next_step(self) -> list[MicroBatch] | None:
        plan = self.control.decide(self._plan() if self.control.rank == 0 else None, StepPlan)
        if plan is None:
            return None
        self.step = plan.step + 1
        return self._fetch(plan)

    def _plan(self) -> StepPlan | None:
        """The next step's plan, opening epochs as needed; None at the end of the run."""
        settings, deadline = self.settings, time.monotonic() + self.settings.stall_s
        if settings.max_steps is not None and self.step > settings.max_steps:
            return None
        while not self._stop.is_set() and self.epoch < settings.epochs:
            self._open_epoch()
            answer = self.ledger.plan(
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
            elif time.monotonic() > deadline:
                raise StallError(self._explain_stall(answer))
            else:
                time.sleep(POLL_S)
        return None

    def _explain_stall(self, wait: Wait) -> str:
        needs = f"step {wait.step} needs {wait.needed} samples and has {wait.ready}"
        return f"no progress for {self.settings.stall_s:g} s: {needs}; {blame(self.ledger)}"

    def _open_epoch(self) -> None:
        if self.epoch in self._opened:
            return
        self.ledger.open_epoch(self.incarnation, self.epoch, epoch_slots(self.run, self.epoch))
        self._opened.add(self.epoch)

    def _fetch(self, plan: StepPlan) -> list[MicroBatch]:
        total = sum(self._supervised(planned.sample) for planned in plan.samples)
        step_tokens = sum(planned.tokens for planned in plan.samples)
        return [
            MicroBatch(
                step=plan.step,
                index=index,
                last_of_step=index == plan.micro_batches - 1,
                samples=self.fetcher.fetch(plan, index),
                total=max(total, 1),
                step_tokens=step_tokens,
            )
            for index in range(plan.micro_batches)
        ]

    def _supervised(self, sample: int) -> int:
        mask = self.samples[sample].loss_mask
        return len(supervised_positions(mask, (len(mask),)))
