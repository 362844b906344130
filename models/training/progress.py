"""Progress of training: one line for a person, one JSON line for the tracker."""

import math
import time
from dataclasses import dataclass, field, replace

import torch

from infra.data_plane.bottleneck import side_rates, slow_side
from infra.files.lines import as_line
from infra.ledger.ledger import Ledger
from infra.ledger.pulse import in_flight
from infra.quantities import duration
from infra.records.data_path import HELDOUT_LENGTH, HELDOUT_SEEN, SideRates
from infra.refusal import Refusal
from models.drafts.base import DraftLoss
from models.run import PreparedRun
from models.training.control import Control
from models.training.heldout import look_of, overfitting_warning, read_history

COUNTERS = ("tokens", "trained_s", "waited_s", "supervised", "covered")
RATES_S = 60.0
"""The generators' rate in a progress line covers captures of this many seconds."""


@dataclass
class StreamTimes:
    """Seconds since this trainer's start."""

    waited_s: float = 0.0
    """The optimizer waited for a step."""
    fetch_s: float = 0.0
    """Samples were copied, in the background."""


@dataclass
class ProgressWindow:
    """Sums since the last progress line."""

    opened: StreamTimes
    """The stream's times when the window opened."""
    sums: torch.Tensor
    """`[2 * S + 1]` float64 on the training's device: positions accepted, positions tried, loss (not a number where a
    gradient is not finite)."""
    steps: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)


class ProgressReporter:
    """Collects counts and says every `log_steps` steps how training goes.

    `positions`: S, those that the draft proposes. `counters`: those of the checkpoint that training resumes from.
    """

    def __init__(
        self,
        run: PreparedRun,
        ledger: Ledger,
        control: Control,
        times: StreamTimes,
        positions: int,
        counters: dict[str, float] | None = None,
    ):
        self.ledger, self.control, self.times, self._metrics = ledger, control, times, run.folder.metrics
        self.total_steps = run.config.training.total_steps(run.samples.train_samples)
        self.totals: dict[str, float] = dict.fromkeys(COUNTERS, 0.0) | (counters or {})
        """Of the whole run, whoever trained before."""
        self.fetched = 0
        """Tokens since this trainer's start."""
        self.loss = 0.0
        self.acceptance: list[float] = []
        self.heldout: dict[str, float] = {}
        """Acceptance length on the held-out texts, where it was measured since the last progress line."""
        self.window = ProgressWindow(replace(times), torch.zeros(2 * positions + 1, dtype=torch.float64))
        self._history = read_history(self._metrics)

    def counters(self) -> dict[str, float]:
        """What a checkpoint keeps, the open window included."""
        window, totals = self.window, self.totals
        return totals | {
            "trained_s": totals["trained_s"] + (time.monotonic() - window.started),
            "waited_s": totals["waited_s"] + (self.times.waited_s - window.opened.waited_s),
        }

    def add(self, outcome: DraftLoss | None) -> None:
        """Count one micro-batch."""
        if outcome is None:
            return
        counts = (outcome.accepted, outcome.tried, outcome.loss)
        counts = torch.cat([count.detach().double().flatten() for count in counts])
        # Added up where they are: the host would wait for every micro-batch.
        self.window.sums = self.window.sums.to(counts.device, non_blocking=True) + counts
        self.totals["supervised"] += outcome.supervised
        self.totals["covered"] += outcome.covered

    def check_finite(self, step: int) -> None:
        """Raise Refusal on all ranks if a loss or a gradient of any of them since the last progress line is not finite.

        Waits for the device.
        """
        _check_finite(float(self.window.sums[-1]), step - self.window.steps, step)

    def step_done(self, tokens: int, gradient_norm: torch.Tensor) -> None:
        """Count an optimizer step, whose gradients of all ranks had that norm."""
        # A rank knows its own losses only, and a finite loss may have a gradient that is not: the norm is of all.
        self.window.sums = self.window.sums.to(gradient_norm.device, non_blocking=True)
        self.window.sums[-1] += gradient_norm * 0
        self.window.steps += 1
        self.window.tokens += tokens
        self.fetched += tokens
        self.totals["tokens"] += tokens

    def report(self, step: int, learning_rate: float) -> None:
        """Close the window; rank 0 prints a line and appends to metrics.jsonl."""
        window = self.window
        if not window.steps:
            return
        self.window = ProgressWindow(replace(self.times), torch.zeros_like(window.sums))
        elapsed = self.window.started - window.started
        waited = self.window.opened.waited_s - window.opened.waited_s
        sums = self.control.total(window.sums.cpu())
        _check_finite(float(sums[-1]), step - window.steps, step)
        accepted, tried = sums[:-1].chunk(2)
        self.totals["trained_s"] += elapsed
        self.totals["waited_s"] += waited
        self.loss = float(sums[-1]) / window.steps
        self.acceptance = (accepted / tried.clamp(min=1)).tolist()
        if self.control.rank:
            return
        rates = side_rates(
            self.ledger.capture_rates(RATES_S),
            trained_tokens=window.tokens,
            trained_s=elapsed,
            waited_s=waited,
            fetch_s=self.window.opened.fetch_s - window.opened.fetch_s,
            ranks=self.control.world,
        )
        metrics = {
            "step": step,
            "time": time.time(),  # seconds since 1970
            "total_steps": self.total_steps,
            "tokens": int(self.totals["tokens"]),
            "loss": self.loss,
            "learning_rate": learning_rate,
            "acceptance_by_position": self.acceptance,
            "tokens_per_s": window.tokens / elapsed,
            "data_wait_share": waited / elapsed,
            "samples_in_flight": in_flight(self.ledger),
            "seconds": self.totals["trained_s"],
            "slow_side": slow_side(rates),
            "rates": rates.model_dump(),
        }
        metrics |= self.heldout
        names = {HELDOUT_LENGTH: "held-out length", HELDOUT_SEEN: "after images"}
        heldout = "".join(f"{names[name]} {length:.2f} | " for name, length in self.heldout.items())
        with self._metrics.open("a") as file:
            file.write(as_line(metrics))
        print(
            f"step {step}/{self.total_steps}{self._time_left(step)} | loss {self.loss:.3f} | acceptance "
            f"{' '.join(f'{rate:.2f}' for rate in self.acceptance)} | {heldout}"
            f"{metrics['tokens_per_s']:,.0f} tokens/s | data wait {metrics['data_wait_share']:.1%} | "
            f"{metrics['samples_in_flight']} samples in flight | {_slow(rates)}",
            flush=True,
        )
        self._history.append(look_of(metrics))
        if HELDOUT_LENGTH in self.heldout and (warning := overfitting_warning(self._history)):
            print(f"warning: {warning}", flush=True)
        self.heldout = {}

    def _time_left(self, step: int) -> str:
        seconds = (self.total_steps - step) * self.totals["trained_s"] / step
        return "" if step == self.total_steps else f", {duration(seconds)} left"

    def rates(self) -> SideRates:
        """Rates of the whole run so far; fetching since this trainer's start represents all of it."""
        captured = self.ledger.capture_rates()
        return side_rates(
            captured,
            trained_tokens=int(self.totals["tokens"]),
            trained_s=self.totals["trained_s"],
            waited_s=self.totals["waited_s"],
            fetch_s=self.times.fetch_s * captured.tokens / max(1, self.fetched),
            ranks=self.control.world,
        )


def _check_finite(loss: float, before: int, step: int) -> None:
    if not math.isfinite(loss):
        raise Refusal(  # the same steps would give the same loss again
            f"the loss or its gradient in steps {before + 1} to {step} is not finite: start a new run with a lower "
            "training.learning_rate, or, if a device was at fault, resume this one, whose checkpoints are sound"
        )


def _slow(rates: SideRates) -> str:
    sides = (("inference", rates.inference), ("transport", rates.transport), ("training", rates.training))
    shown = ", ".join(f"{side} {rate:,.0f}" for side, rate in sides if rate is not None)
    return f"slow side: {slow_side(rates)} ({shown} tokens/s)"
