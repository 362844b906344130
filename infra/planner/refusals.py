"""What cannot work, and the nearest recipe that can. Pure; each finding names the settings to change."""

from collections.abc import Iterator

from infra.planner.memory import longest_sample, planned_chunk_tokens, rank_memory
from infra.planner.plan import Job, Plan, make_plan, memory_left
from infra.quantities import byte_size, plural
from infra.records.data_path import Record

GIB = 2**30
LEAST_CHUNK = 32
TARGET_SHARE = 0.9
"""Share of a generator's memory that the target's weights may take; the rest is its cache's."""
HOST_SHARE = 0.8
"""Share of the host's memory that samples may take; engines, trainers and the page cache need the rest."""


class PlanObstacle(Record):
    """One reason why the job cannot run, and overrides of the recipe that remove it, if any."""

    problem: str
    overrides: tuple[str, ...] = ()
    otherwise: str = ""
    """What else a person can do."""

    def __str__(self) -> str:
        nearest = f"nearest possible recipe: {' '.join(self.overrides)}" if self.overrides else ""
        return f"{self.problem}; " + "; or ".join(filter(None, (nearest, self.otherwise)))


def refusals(plan: Plan) -> tuple[PlanObstacle, ...]:
    """Everything that makes the plan impossible."""
    return tuple(_found(plan))


def _found(plan: Plan) -> Iterator[PlanObstacle]:
    job = plan.job
    if job.device.is_gpu and job.memory_bytes:
        room = int(job.memory_bytes * job.devices_per_generator * TARGET_SHARE)
        if plan.target_bytes > room:
            held = "as it is quantized" if job.target.bytes_per_weight else f"in {job.inference_precision}"
            needed, machines = _on_machines(job, least_devices(plan.target_bytes, job.memory_bytes))
            yield PlanObstacle(
                problem=f"the target's weights take {plan.target_bytes / GIB:.0f} GiB {held}, "
                f"and a generator has {job.devices_per_generator} x {job.memory_bytes / GIB:.0f} GiB, of which a tenth "
                "is left to its cache",
                overrides=("generator.engine=sglang", f"pools.inference_gpus={needed * job.generators}", *machines),
            )
        elif job.devices_per_generator > job.machine_devices * job.generator_machines > 0:
            devices, machines = _on_machines(job, job.devices_per_generator)
            yield PlanObstacle(
                problem=f"a generator's copy of the target is divided among {job.devices_per_generator} GPUs, and "
                f"{plural(job.generator_machines, 'machine')} of {job.machine_devices} (plan.gpus_per_machine) hold it",
                overrides=(f"pools.inference_gpus={devices * job.generators}", *machines),
                otherwise="more generators (generator.count)",
            )
    if job.memory_bytes and memory_left(job, plan.memory) < 0:
        yield _too_much_memory(plan)
    if job.host_bytes and _host_needs(plan) > job.host_bytes * HOST_SHARE:
        yield _too_much_of_the_host(plan)
    budget = plan.store_bytes if job.budget_bytes is None else job.budget_bytes
    if plan.store_bytes > budget and (not job.rounds or job.rounds > job.epochs):
        setting = "transport.round_mib" if job.rounds else "transport.budget_mib"
        yield PlanObstacle(
            problem=f"the store must hold {plan.store_bytes / 2**20:,.0f} MiB (samples in flight, each as long as the "
            f"longest), and {setting} allows {budget / 2**20:,.0f}",
            overrides=(f"{setting}={-(-plan.store_bytes // 2**20)}",),
            otherwise="shorter samples (data.max_tokens), or fewer in hand (training.prefetch_steps, "
            "generator.lease_samples, training.samples_per_step)",
        )


def least_devices(target_bytes: int, memory_bytes: int) -> int:
    """GPUs that hold a copy of the target: a power of two, because other numbers seldom divide its heads."""
    return _power_of_two(-(-target_bytes // int(memory_bytes * TARGET_SHARE)))


def _on_machines(job: Job, devices: int) -> tuple[int, tuple[str, ...]]:
    """Number of GPUs for a generator that needs at least `devices`, a power of two, and the overrides that spread it
    over machines; none if one machine is enough."""
    devices = _power_of_two(devices)
    if devices <= job.machine_devices or not job.machine_devices:
        return devices, ()
    machines = _power_of_two(-(-devices // job.machine_devices))
    cluster = () if job.generator_machines > 1 else ("pools.kind=ray", "transport.kind=mooncake")
    return machines * job.machine_devices, (*cluster, f"pools.machines_per_generator={machines}")


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _host_needs(plan: Plan) -> int:
    """Host memory for samples: pinned memory of all ranks, and the store, unless it consists of files."""
    job = plan.job
    stored = 0 if job.rounds else min(plan.store_bytes, job.budget_bytes or plan.store_bytes)
    return job.pinned_bytes * job.ranks * job.setting.context + stored


def _too_much_of_the_host(plan: Plan) -> PlanObstacle:
    job, needs, room = plan.job, _host_needs(plan), int(plan.job.host_bytes * HOST_SHARE)
    pinned = job.pinned_bytes * job.ranks * job.setting.context
    problem = (
        f"samples need {needs / GIB:.0f} GiB of host memory, {pinned / GIB:.0f} GiB of it pinned by the trainer "
        f"ranks, and {room / GIB:.0f} of the host's {job.host_bytes / GIB:.0f} GiB can be planned"
    )
    for steps in range(job.setting.prefetch_steps - 1, -1, -1):
        setting = job.setting.model_copy(update={"prefetch_steps": steps})
        if _host_needs(make_plan(job.model_copy(update={"setting": setting}))) <= room:
            return PlanObstacle(problem=problem, overrides=(f"training.prefetch_steps={steps}",))
    return PlanObstacle(problem=problem, otherwise="a smaller training.samples_per_step or data.max_tokens")


def _too_much_memory(plan: Plan) -> PlanObstacle:
    job, memory = plan.job, plan.memory
    room = max(0, memory.total + memory_left(job, memory))
    problem = (
        f"a trainer rank would need {memory.total / GIB:.1f} GiB for a micro-batch of "
        f"{plural(len(job.micro_batch), 'sample')}, the longest of {job.longest_tokens:,} tokens, and "
        f"{room / GIB:.1f} of its {job.rank_bytes / GIB:.1f} GiB can be planned"
    )
    if job.sharing == "share":
        return PlanObstacle(
            problem=f"{problem}; a generator on the same GPU needs the other {byte_size(job.generator_bytes)}",
            overrides=("pools.sharing=alternate",),
        )
    for changed, overrides in _smaller(job):
        if memory_left(changed, rank_memory(job.draft, job.target, changed.setting, changed.micro_batch)) >= 0:
            return PlanObstacle(problem=problem, overrides=overrides)
    return PlanObstacle(
        problem=problem, otherwise="weights, moments and tables alone do not fit: a smaller draft.vocab_size or draft"
    )


def _smaller(job: Job) -> Iterator[tuple[Job, tuple[str, ...]]]:
    """Jobs that need less memory, the nearest first: what changes no result, then shorter samples."""
    most = -(-job.samples_per_step // job.ranks)
    parts = job.micro_batches + 1
    while parts <= most:
        yield job.model_copy(update={"micro_batches": parts}), (f"training.micro_batches={parts}",)
        samples = -(-most // parts)
        # The next number of micro-batches that are smaller than these: of the ones between, none needs less memory.
        parts = -(-most // (samples - 1)) if samples > 1 else most + 1
    alone = job.model_copy(update={"micro_batches": max(job.micro_batches, most)})
    overrides = (f"training.micro_batches={most}",) if most > job.micro_batches else ()
    chunk = job.setting.chunk_tokens or planned_chunk_tokens(job.draft, job.setting)
    while chunk > LEAST_CHUNK:
        chunk = max(LEAST_CHUNK, chunk // 2)
        setting = job.setting.model_copy(update={"chunk_tokens": chunk})
        yield alone.model_copy(update={"setting": setting}), (*overrides, f"training.loss_chunk_tokens={chunk}")
    if not job.setting.recompute and job.draft.kept.carried is not None:
        setting = job.setting.model_copy(update={"recompute": True})
        yield alone.model_copy(update={"setting": setting}), (*overrides, "training.recompute=true")
        alone, overrides = alone.model_copy(update={"setting": setting}), (*overrides, "training.recompute=true")
    longest = longest_sample(job.draft, job.target, alone.setting, job.memory_bytes)
    if longest >= 8:
        shorter = {"longest_tokens": longest, "mean_tokens": min(longest, job.mean_tokens)}
        yield alone.model_copy(update=shorter), (*overrides, f"data.max_tokens={longest}")
