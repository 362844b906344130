"""Counts add up where the draft trains, and a loss that is not finite ends the training before it is kept."""

import pytest
import torch
from emulated_device import DEVICE, emulated_device

from infra.refusal import Refusal
from models.drafts.base import DraftLoss
from models.run import PreparedRun
from models.training.control import Control
from models.training.progress import ProgressReporter, StreamTimes


@pytest.fixture
def run(make_run) -> PreparedRun:
    return PreparedRun.open(make_run("run").path)


@pytest.fixture
def progress(run: PreparedRun) -> ProgressReporter:
    return ProgressReporter(run, run.open_ledger(), Control(), StreamTimes(), positions=2)


def outcome(loss: float) -> DraftLoss:
    counts = torch.tensor([3, 1], device=DEVICE), torch.tensor([4, 3], device=DEVICE)
    return DraftLoss(torch.tensor(loss, device=DEVICE), *counts, supervised=5, covered=4)


def test_micro_batches_are_counted_without_a_wait(progress: ProgressReporter) -> None:
    with emulated_device() as traffic:
        given, norm = [outcome(0.5) for _ in range(4)], torch.tensor(7.0, device=DEVICE)
        traffic.clear()
        for one in given:
            progress.add(one)
        progress.step_done(100, norm)
        assert not traffic.to_host
        assert traffic.waits.total() == 0
        progress.report(1, 0.1)
        assert len(traffic.to_host) == 1
    assert (progress.loss, progress.acceptance) == (2.0, [0.75, 1 / 3])
    assert (progress.totals["supervised"], progress.totals["covered"]) == (20, 16)


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_a_step_that_is_not_finite_is_noticed_before_anything_is_kept(
    run: PreparedRun, progress: ProgressReporter, loss: float, norm: float
) -> None:
    """Also where a later step of the same progress line is finite, and where only another rank's loss is not: the
    norm is of all ranks' gradients."""
    with emulated_device():
        for one, other in ((1.0, 1.0), (loss, norm), (1.0, 1.0)):
            progress.add(outcome(one))
            progress.step_done(100, torch.tensor(other, device=DEVICE))
        for check in (lambda: progress.check_finite(3), lambda: progress.report(3, 0.1)):
            # A refusal, because the same steps would give the same loss after a restart.
            with pytest.raises(Refusal, match=r"steps 1 to 3 is not finite: start .* lower training\.learning_rate"):
                check()
    assert not run.folder.metrics.exists()
