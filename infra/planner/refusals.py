"""What cannot work, and the nearest recipe that can. Pure; each finding names the settings to change."""

from collections.abc import Iterator

from infra.planner.memory import RESERVED, longest_sample, planned_chunk_tokens, rank_memory
from infra.planner.plan import Job, Plan, memory_left
from infra.planner.shapes import ITEM_BYTES
from infra.quantities import byte_size, plural
from infra.records.data_path import Record

GIB = 2**30
LEAST_CHUNK = 32
MOST_DEVICES = 1024
"""GPUs that are tried for one copy of the target."""
MOST_SHARE = 0.9
"""The largest generator.sglang.memory_fraction that is proposed; the rest is for activations and CUDA graphs."""
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
    if job.device.is_gpu and job.memory_bytes and not job.captures_elsewhere:
        if not job.holds_target(job.devices_per_generator):
            yield _too_large_a_target(plan)
        elif job.devices_per_generator > job.machine_devices * job.generator_machines > 0:
            overrides, otherwise = _more_devices(job, job.devices_per_generator)
            yield PlanObstacle(
                problem=f"a generator's copy of the target is divided among {job.devices_per_generator} GPUs, and "
                f"{plural(job.generator_machines, 'machine')} of {job.machine_devices} (plan.gpus_per_machine) hold it",
                overrides=overrides,
                otherwise="; or ".join(filter(None, (otherwise, "more generators (generator.count)"))),
            )
    if job.sharing == "share" and job.obstacle_to_share:
        yield PlanObstacle(problem=job.obstacle_to_share, overrides=("pools.sharing=alternate",))
    elif job.memory_bytes and memory_left(job, plan.memory) < 0:
        yield _too_much_memory(plan)
    if job.host_bytes and job.host_needs > job.host_bytes * HOST_SHARE:
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


def least_devices(job: Job) -> int | None:
    """GPUs that hold a copy of the target in SGLang: a power of two, because other numbers seldom divide its heads.

    None where no number of them does: a cache that is not divided may be larger than a GPU.
    """
    served = job.model_copy(update={"serves": True})
    counts = (1 << power for power in range(MOST_DEVICES.bit_length()))
    return next((count for count in counts if count >= job.attention_groups and served.holds_target(count)), None)


def _too_large_a_target(plan: Plan) -> PlanObstacle:
    job = plan.job
    held = "as it is quantized" if job.target.bytes_per_weight else f"in {job.inference_precision}"
    problem = (
        f"the target's weights take {plan.target_bytes / GIB:.0f} GiB {held}, and a generator has "
        f"{job.devices_per_generator} x {job.memory_bytes / GIB:.0f} GiB, of which "
        f"{job.static_room(job.devices_per_generator) / GIB:.1f} GiB each are for weights"
    )
    if job.serves:
        cached = job.target.cache_per_token * job.longest_tokens * ITEM_BYTES[job.inference_precision]
        problem += f" and the KV cache, which needs {byte_size(cached)} for the longest sample"
    least, share = least_devices(job), _larger_share(job)
    fraction = f"generator.sglang.memory_fraction={share}" if share else ""
    if least is None:
        wanted, otherwise = (), "shorter samples (data.max_tokens), or a smaller or quantized target"
    else:
        wanted, otherwise = _more_devices(job, least)
    if wanted:
        return PlanObstacle(problem=problem, overrides=("generator.engine=sglang", *wanted), otherwise=fraction)
    return PlanObstacle(problem=problem, overrides=(fraction,) if fraction else (), otherwise=otherwise)


def _larger_share(job: Job) -> float | None:
    """Share of memory for SGLang's weights and cache with which a generator's GPUs hold the target, if there is one.

    SGLang's default is cautious; this one leaves what the planner expects of a forward.
    """
    if not job.serves or job.sharing == "share":
        return None
    others = job.generator_bytes - job.static_bytes
    share = min(MOST_SHARE, int(100 * (job.memory_bytes - others) / (job.memory_bytes - RESERVED)) / 100)
    larger = job.model_copy(update={"engine_share": share})
    return share if share > 0 and larger.holds_target(job.devices_per_generator) else None


def _more_devices(job: Job, devices: int) -> tuple[tuple[str, ...], str]:
    """Overrides that give a generator at least `devices` GPUs; or, where this machine has too few, what else to do."""
    devices, machines = _on_machines(job, devices)
    generators = min(job.generators, job.own_devices // devices) if job.own_devices else job.generators
    if not generators:
        return (), f"this machine has {plural(job.own_devices, 'GPU')}: choose a smaller or quantized target"
    fewer = (f"generator.count={generators}",) if generators < job.generators else ()
    return (f"pools.inference_gpus={devices * generators}", *fewer, *machines), ""


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


def _too_much_of_the_host(plan: Plan) -> PlanObstacle:
    job, needs, room = plan.job, plan.job.host_needs, int(plan.job.host_bytes * HOST_SHARE)
    pinned = job.pinned_bytes * job.ranks * job.setting.context
    problem = (
        f"samples need {needs / GIB:.0f} GiB of host memory, {pinned / GIB:.0f} GiB of it pinned by the trainer "
        f"ranks, and {room / GIB:.0f} of the host's {job.host_bytes / GIB:.0f} GiB can be planned"
    )
    for steps in range(job.setting.prefetch_steps - 1, -1, -1):
        setting = job.setting.model_copy(update={"prefetch_steps": steps})
        if job.model_copy(update={"setting": setting}).host_needs <= room:
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
    if job.unified:
        problem += f" (samples take {byte_size(job.host_needs)} of the same memory)"
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
    for steps in range(job.setting.prefetch_steps - 1, -1, -1) if job.unified else ():
        setting = job.setting.model_copy(update={"prefetch_steps": steps})
        yield job.model_copy(update={"setting": setting}), (f"training.prefetch_steps={steps}",)
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
    longest = longest_sample(job.draft, job.target, alone.setting, job.rank_bytes)
    if longest >= 8:
        shorter = {"longest_tokens": longest, "mean_tokens": min(longest, job.mean_tokens)}
        yield alone.model_copy(update=shorter), (*overrides, f"data.max_tokens={longest}")
