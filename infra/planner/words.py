"""A plan in words and tables, for the terminal, for Prefect's pages and for reports. Every figure has its unit."""

from collections.abc import Iterator

from infra.planner.plan import Plan
from infra.planner.shapes import Precision
from infra.planner.split import Split, advice, all_splits
from infra.quantities import byte_size, duration, figure, plural, si
from infra.records.data_path import Record

SHOWN_SPLITS = 9
LEDGER_MEASURED = 500
"""Transactions per second that SQLite and PostgreSQL reached on two cores (benchmarks/results/ledger.json)."""
COMPONENTS = {
    "weights": "weights, float32",
    "gradients": "gradients, float32",
    "optimizer": "AdamW's moments, float32",
    "averaged": "averaged weights, float32",
    "frozen_tables": "frozen tables of the target",
    "cast_weights": "weights cast to bfloat16",
    "features": "hidden states",
    "activations": "activations, all steps",
    "loss": "loss and its gradients",
}


class Section(Record):
    """One table; the first column is text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    """Row that stands out."""


def headline(plan: Plan) -> str:
    """What is planned."""
    job = plan.job
    where = f"{job.devices} x {job.device.name}" if job.device.is_gpu else plural(job.devices, "CPU core")
    return (
        f"{job.name}: {job.draft.title} with {millions(job.draft.parameters)} trained weights, on {where}, "
        f"{job.inference_devices} inference + {job.training_devices} training"
    )


def verdicts(plan: Plan) -> Iterator[str]:
    """The main results: whether it fits, its speed, what would be better, duration and cost."""
    job, memory = plan.job, plan.memory
    if plan.longest_sample is not None:
        yield (
            f"Memory: {byte_size(memory.total)} of {byte_size(job.memory_bytes)} per rank; the longest sample that "
            f"fits has {plan.longest_sample:,} tokens, the recipe allows {job.longest_tokens:,}"
        )
    present = plan.present
    yield (
        f"Speed: {figure(present.samples_per_s)} samples/s; inference gives {figure(present.inference)}, training "
        f"takes {figure(present.training)}, so {present.slow_side} is the slow side"
    )
    yield f"Split: {advice(plan.sides, present, job.unit)}"
    cost = f", ${plan.cost:,.2f}" if job.device.price_per_hour else ""
    yield (
        f"Time: {duration(plan.seconds)} for {plan.trained_samples:,} samples ({job.epochs} x {job.samples:,}), "
        f"{figure(plan.device_hours)} {job.unit}-hours{cost}"
    )


def sections(plan: Plan) -> tuple[Section, ...]:
    """Every table, the most wanted first."""
    return (_splits(plan), _compute(plan), _memory(plan), _traffic(plan))


def _splits(plan: Plan) -> Section:
    splits = all_splits(plan.sides, plan.job.devices)
    best = plan.best
    at = splits.index(best) if best else 0
    start = max(0, min(at - SHOWN_SPLITS // 2, len(splits) - SHOWN_SPLITS))
    shown = splits[start : start + SHOWN_SPLITS]
    most = best.samples_per_s if best else 1.0
    return Section(
        title="Split of the devices",
        columns=("inference + training", "samples/s", "of the best", "inference could", "training could", "slow side"),
        rows=tuple(_split_row(one, plan.present, most) for one in shown),
        marked=at - start if best else None,
    )


def _split_row(one: Split, present: Split, most: float) -> tuple[str, ...]:
    name = f"{one.name} (recipe)" if one.name == present.name else one.name
    sides = (f"{figure(one.inference)}/s", f"{figure(one.training)}/s")
    return (name, figure(one.samples_per_s), f"{one.samples_per_s / most:.0%}", *sides, one.slow_side)


def _compute(plan: Plan) -> Section:
    job, present = plan.job, plan.present

    def row(name: str, flops: float, precision: Precision, share: float, devices: int, rate: float) -> tuple[str, ...]:
        peak = f"{share:.1%} of {si(job.device.peak[precision], 'FLOP/s')} ({precision})"
        return name, si(flops, "FLOP"), peak, plural(devices, job.unit), f"{figure(rate)}/s"

    prefill = (plan.prefill_flops, job.inference_precision, job.inference_share, job.inference_devices)
    draft = (plan.draft_flops, job.setting.precision, job.training_share, job.training_devices)
    return Section(
        title=f"Computing, a sample of {job.mean_tokens:,} tokens",
        columns=("side", "per sample", "share of peak", "devices", "samples"),
        rows=(
            row("inference: prefill", *prefill, present.inference),
            row("training: draft", *draft, present.training),
        ),
    )


def _memory(plan: Plan) -> Section:
    job, memory = plan.job, plan.memory
    rows = [(COMPONENTS[name], byte_size(size)) for name in COMPONENTS if (size := getattr(memory, name))]
    rows.append(("peak of a rank", byte_size(memory.total)))
    count = len(job.micro_batch)
    others = f" and {count - 1} of {job.mean_tokens:,}" if count > 1 else ""
    return Section(
        title=f"Memory of a trainer rank, micro-batch: one sample of {job.longest_tokens:,} tokens{others}",
        columns=("component", "bytes"),
        rows=tuple(rows),
        marked=len(rows) - 1,
    )


def _traffic(plan: Plan) -> Section:
    job, flow = plan.job, plan.traffic
    rows = [
        ("hidden states, a token", byte_size(job.bytes_per_token)),
        ("hidden states, a sample", f"{byte_size(job.bytes_per_token * job.mean_tokens)} (mean), "
         f"{byte_size(job.bytes_per_token * job.longest_tokens)} (longest)"),
        ("out of each generator", f"{byte_size(flow.generator_bytes_per_s)}/s"),
        ("into each rank", f"{byte_size(flow.rank_bytes_per_s)}/s"),
        ("generators to ranks, in all", f"{byte_size(flow.wire_bytes_per_s)}/s" + _of_link(plan)),
        ("store, at most", f"{byte_size(plan.store_bytes)} of {byte_size(job.budget_bytes)} (transport.budget_mib)"),
        ("ledger", f"{figure(flow.ledger_transactions_per_s)} transactions/s{_of_ledger(plan)}"),
        ("a checkpoint on disk", byte_size(plan.checkpoint_bytes)),
        ("the target's weights", f"{byte_size(plan.target_bytes)} per generator"),
    ]  # fmt: skip
    return Section(title="What flows and what is kept", columns=("what", "how much"), rows=tuple(rows))


def _of_link(plan: Plan) -> str:
    link = plan.job.link_bytes_per_s
    return f", {plan.traffic.wire_bytes_per_s / link:.0%} of a machine's link" if link else ", inside one machine"


def _of_ledger(plan: Plan) -> str:
    over = plan.traffic.ledger_transactions_per_s > LEDGER_MEASURED
    return f": more than the {LEDGER_MEASURED} measured on two cores" if over else ""


def millions(count: int) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 10**7 else f"{count / 1e6:,.2f} million"
