"""Progress of training: one line for a person, one JSON line for the tracker."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from infra.data_plane.bottleneck import side_rates, slow_side
from infra.files.lines import as_line
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.records.data_path import HELDOUT_LENGTH, SideRates
from models.drafts.base import DraftLoss
from models.training.control import Control
from models.training.overfitting import look_of, overfitting_warning, read_history
from models.training.stream import StepStream

RATES_S = 60.0
"""The generators' rate in a progress line covers captures of this many seconds."""


@dataclass
class ProgressWindow:
    """Sums since the last progress line. S is the number of proposed positions."""

    accepted: torch.Tensor | None = None
    tried: torch.Tensor | None = None
    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    """The stream's waiting and fetching when the window opened."""
    fetch_s: float = 0.0


class ProgressReporter:
    """Collects counts and says every `log_steps` steps how training goes."""

    def __init__(self, folder: RunFolder, ledger: Ledger, control: Control, stream: StepStream, total_steps: int):
        self.folder, self.ledger, self.control, self.stream = folder, ledger, control, stream
        self.total_steps = total_steps
        self.window = ProgressWindow()
        self.tokens = 0
        self.fetched = 0
        """Tokens of this trainer's own life, whoever trained before."""
        self.trained_s = 0.0
        self.waited_s = 0.0
        self.supervised = 0
        self.covered = 0
        self.loss = 0.0
        self.acceptance: list[float] = []
        self.heldout_length: float | None = None
        """Acceptance length on the held-out texts, where it was measured since the last progress line."""
        self._history = read_history(folder.metrics)

    def restore(self, counters: dict[str, float]) -> None:
        """Go on counting where a checkpoint left off."""
        self.tokens, self.trained_s = int(counters["tokens"]), counters["trained_s"]
        self.waited_s = counters["waited_s"]
        self.supervised, self.covered = int(counters["supervised"]), int(counters["covered"])

    def counters(self) -> dict[str, float]:
        """What a checkpoint keeps, the open window included."""
        elapsed = time.monotonic() - self.window.started
        return {
            "tokens": float(self.tokens),
            "trained_s": self.trained_s + elapsed,
            "waited_s": self.waited_s + self.stream.waited_s - self.window.waited_s,
            "supervised": float(self.supervised),
            "covered": float(self.covered),
        }

    def add(self, outcome: DraftLoss | None) -> None:
        """Count one micro-batch."""
        if outcome is None:
            return
        window = self.window
        window.accepted = outcome.accepted.double() + (0 if window.accepted is None else window.accepted)
        window.tried = outcome.tried.double() + (0 if window.tried is None else window.tried)
        window.loss += float(outcome.loss.detach())
        self.supervised += int(outcome.supervised)
        self.covered += int(outcome.covered)

    def step_done(self, tokens: int) -> None:
        self.window.steps += 1
        self.window.tokens += tokens
        self.fetched += tokens
        self.tokens += tokens

    def report(self, step: int, learning_rate: float, positions: int) -> None:
        """Close the window; rank 0 prints a line and appends to metrics.jsonl."""
        window, now = self.window, time.monotonic()
        if not window.steps:
            return
        zeros = torch.zeros(positions, dtype=torch.float64)
        counts = [zeros if part is None else part for part in (window.accepted, window.tried)]
        sums = self.control.total(torch.cat([*counts, torch.tensor([window.loss], dtype=torch.float64)]))
        accepted, tried = sums[:positions], sums[positions : 2 * positions]
        elapsed, waited = now - window.started, self.stream.waited_s - window.waited_s
        self.trained_s, self.waited_s = self.trained_s + elapsed, self.waited_s + waited
        self.loss = float(sums[-1]) / window.steps
        self.acceptance = (accepted / tried.clamp(min=1)).tolist()
        fetched = self.stream.fetcher.fetch_s - window.fetch_s
        self.window = ProgressWindow(started=now, waited_s=self.stream.waited_s, fetch_s=self.stream.fetcher.fetch_s)
        if self.control.rank:
            return
        states = self.ledger.progress()
        rates = side_rates(
            self.ledger.capture_rates(RATES_S),
            trained_tokens=window.tokens, trained_s=elapsed, waited_s=waited, fetch_s=fetched, ranks=self.control.world,
        )  # fmt: skip
        metrics = {
            "step": step,
            "total_steps": self.total_steps,
            "tokens": self.tokens,
            "loss": self.loss,
            "learning_rate": learning_rate,
            "acceptance_by_position": self.acceptance,
            "tokens_per_s": window.tokens / elapsed,
            "data_wait_share": waited / elapsed,
            "samples_in_flight": states.leased + states.ready + states.taken,
            "seconds": self.trained_s,
            "slow_side": slow_side(rates),
            "rates": rates.model_dump(),
        }
        heldout = ""
        if self.heldout_length is not None:
            metrics[HELDOUT_LENGTH] = self.heldout_length
            heldout = f"held-out length {self.heldout_length:.2f} | "
        with self.folder.metrics.open("a") as file:
            file.write(as_line(metrics))
        shown = " ".join(f"{rate:.2f}" for rate in self.acceptance)
        print(
            f"step {step}/{self.total_steps}{self._time_left(step)} | loss {self.loss:.3f} | acceptance {shown} | "
            f"{heldout}{metrics['tokens_per_s']:.0f} tokens/s | data wait {metrics['data_wait_share']:.1%} | "
            f"{states.leased + states.ready} samples in flight | {_slow(rates)}",
            flush=True,
        )
        self._compare(metrics)

    def _compare(self, metrics: dict[str, Any]) -> None:
        """Say so when the held-out length and the training's own part."""
        self._history.append(look_of(metrics))
        if self.heldout_length is not None:
            self.heldout_length = None
            warning = overfitting_warning(self._history)
            if warning:
                print(f"warning: {warning}", flush=True)

    def _time_left(self, step: int) -> str:
        seconds = (self.total_steps - step) * self.trained_s / step
        if step == self.total_steps:
            return ""
        return f", {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"

    def rates(self) -> SideRates:
        """Rates of the whole run so far; fetching since this trainer's start represents all of it."""
        captured = self.ledger.capture_rates()
        return side_rates(
            captured,
            trained_tokens=self.tokens, trained_s=self.trained_s, waited_s=self.waited_s,
            fetch_s=self.stream.fetcher.fetch_s * captured.tokens / max(1, self.fetched), ranks=self.control.world,
        )  # fmt: skip


def _slow(rates: SideRates) -> str:
    sides = (("inference", rates.inference), ("transport", rates.transport), ("training", rates.training))
    shown = ", ".join(f"{side} {rate:,.0f}" for side, rate in sides if rate is not None)
    return f"slow side: {slow_side(rates)} ({shown} tokens/s)"
