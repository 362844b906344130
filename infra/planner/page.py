"""A plan for people: its verdicts, and a Markdown page that Prefect and the terminal show."""

from pathlib import Path

from infra.planner.plan import Plan
from infra.planner.refusals import refusals
from infra.planner.split import Split, advice, all_splits
from infra.quantities import byte_size, duration, figure, plural
from infra.templates import render

SHOWN_SPLITS = 9
LEDGER_MEASURED = 500
"""Transactions per second that SQLite and PostgreSQL reached on two cores (benchmarks/results/ledger.json)."""


def headline(plan: Plan) -> str:
    """What is planned."""
    job, millions = plan.job, plan.job.draft.parameters / 1e6
    where = f"{job.devices} x {job.device.name}" if job.device.is_gpu else plural(job.devices, "CPU core")
    split = f"{job.inference_devices} inference + {job.training_devices} training"
    shown = split if job.sharing == "apart" else f"both on the same ({job.sharing})"
    return (
        f"{job.name}: {job.draft.title} with {millions:,.{0 if millions >= 10 else 2}f} million trained weights, on "
        f"{where}, {shown}"
    )


def verdicts(plan: Plan) -> dict[str, str]:
    """The main results: whether it fits, its speed, what would be better, duration and cost."""
    job, present = plan.job, plan.present
    cost = f", ${plan.cost:,.2f}" if job.device.price_per_hour else ""
    fits = {} if plan.longest_sample is None else {
        "Memory": f"{byte_size(plan.memory.total)} of {byte_size(job.rank_bytes)} per rank; the longest sample that "
        f"fits has {plural(plan.longest_sample, 'token')}, the recipe allows {job.longest_tokens:,}"
    }  # fmt: skip
    return fits | {
        "Speed": f"{figure(present.samples_per_s)} samples/s; inference gives {figure(present.inference)}, training "
        f"takes {figure(present.training)}, so {present.slow_side} is the slow side",
        "Sharing": f"{job.sharing}: {job.sharing_why}" + (f"; {plural(job.rounds, 'round')}" if job.rounds else ""),
        "Split": advice(plan.sides, present, job.unit),
        **_regeneration(plan),
        "Time": f"{duration(plan.seconds + plan.regeneration_s)} for {_trained(plan)}, "
        f"{figure(plan.device_hours)} {job.unit}-hours{cost}",
        **({"Twice the data": job.learned} if job.learned else {}),
    }


def _trained(plan: Plan) -> str:
    whole = plan.job.epochs * plan.job.samples
    told = f"{plural(plan.job.epochs, 'epoch')} of {plan.job.samples:,}"
    if plan.trained_samples < whole:
        told = f"training.max_steps, fewer than {told}"
    return f"{plural(plan.trained_samples, 'sample')} ({told})"


def _regeneration(plan: Plan) -> dict[str, str]:
    answers, job = plan.job.answers, plan.job
    if answers is None or plan.regenerated_per_s is None or not answers.before:
        return {}
    requests = answers.requests(job.target, job.inference_precision, job.device)
    count = round(answers.before * job.samples)
    return {
        "Regeneration": f"{duration(plan.regeneration_s)} of the time below for {count:,} answers of "
        f"{plural(answers.answer_tokens, 'token')}, {figure(plan.regenerated_per_s)} tokens/s; "
        f"copies of the target: {answers.copies}, each with {plural(requests, 'request')} at a time"
    }


def plan_page(plan: Plan) -> str:
    """The plan as Markdown: verdicts, obstacles, tables, assumptions."""
    memory = [(field.description, getattr(plan.memory, name)) for name, field in type(plan.memory).model_fields.items()]
    return render(
        Path(__file__).with_name("plan.md.jinja"),
        plan=plan, job=plan.job, traffic=plan.traffic, memory=memory, splits=_shown_splits(plan),
        headline=headline(plan), verdicts=verdicts(plan), obstacles=refusals(plan), ledger_measured=LEDGER_MEASURED,
    )  # fmt: skip


def _shown_splits(plan: Plan) -> tuple[Split, ...]:
    """The best split with its neighbours."""
    splits, best = all_splits(plan.sides, plan.job.devices), plan.best
    start = splits.index(best) - SHOWN_SPLITS // 2 if best else 0
    start = max(0, min(start, len(splits) - SHOWN_SPLITS))
    return splits[start : start + SHOWN_SPLITS]
