"""The plan against what a run measured: used by `draftsmith status` and by the report."""

from collections.abc import Iterator
from pathlib import Path

from infra.planner.plan import Plan, corrected
from infra.planner.split import advice
from infra.quantities import figure
from infra.records.data_path import SideRates


def read_plan(file: Path) -> Plan | None:
    """A run's plan, or None."""
    return Plan.read(file) if file.is_file() else None


def comparison(plan: Plan, rates: SideRates) -> Iterator[tuple[str, str]]:
    """Planned and measured rates of both sides, and the split that the measured ones speak for; nothing before that."""
    now = corrected(plan, rates)
    if now is None:
        return
    shares = (plan.job.inference_share, now.job.inference_share), (plan.job.training_share, now.job.training_share)
    rates_of = (plan.present.inference, now.present.inference), (plan.present.training, now.present.training)
    for side, (assumed, found), (planned, measured) in zip(("inference", "training"), shares, rates_of, strict=True):
        yield (
            side,
            f"{figure(measured)} samples/s measured, {figure(planned)} planned: {found:.1%} of the peak in place of "
            f"{assumed:.0%}",
        )
    yield "split", advice(now.sides, now.present, now.job.unit)
