"""The plan of a run: what it moves, holds, computes, takes and costs, from shapes and assumed rates. Pure."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from infra.planner.answers import Answers
from infra.planner.devices import Device
from infra.planner.memory import (
    RESERVED,
    RankMemory,
    Setting,
    engine_static,
    generator_memory,
    generator_static,
    held_static,
    longest_sample,
    rank_memory,
    usable,
)
from infra.planner.shapes import DraftShape, Precision, TargetShape, draft_flops, muon_flops, prefill_flops
from infra.planner.split import Sides, Split, advice, best_split, measured_sides, split
from infra.planner.traffic import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    Traffic,
    samples_in_flight,
    traffic,
)
from infra.quantities import figure
from infra.records.data_path import Record, SideRates
from infra.records.sharing import SharingMode
from infra.refusal import Refusal

TARGET_SHARE = 0.9
"""Share of a GPU's memory that the target's weights may take in transformers; the rest is for activations."""
SWITCH_S = 90.0
"""Start of an engine and of a trainer in each round. Assumed."""


class Job(Record):
    """All that decides a plan: shapes, the recipe's figures, and what is assumed."""

    name: str
    target: TargetShape
    draft: DraftShape
    setting: Setting
    inference_precision: Precision
    device: Device
    inference_devices: int
    """GPUs, or cores without GPUs."""
    training_devices: int
    generators: int
    devices_per_generator: int
    """Those that one generator uses."""
    generator_machines: int = 1
    """Those that hold a generator's copy of the target together."""
    machine_devices: int = 0
    """GPUs of a machine; 0: unknown."""
    own_devices: int = 0
    """GPUs of the only machine that the run may use; 0: unknown, or there may be several machines."""
    serves: bool = False
    """Whether a generator's engine is SGLang."""
    quantizes: bool = False
    """Whether it quantizes the target's weights when it has loaded them."""
    captures_elsewhere: bool = False
    """Whether hidden states come from servers in service, which have GPUs of their own."""
    engine_share: float | None = None
    """Share of a GPU's memory for SGLang's weights and KV cache; None: SGLang's own default."""
    engine_chunk_tokens: int | None = None
    """Tokens that SGLang prefills at once; None: its own default."""
    attention_groups: int = 1
    """Of a generator's GPUs, with data-parallel attention."""
    devices_per_copy: int = 1
    """Of a generator's GPUs, those that hold one copy of the target together."""
    exclusive: bool = False
    """Whether the compute mode of GPUs lets one process at a time use them."""
    unified: bool = False
    """Whether GPU and host have one memory: `host_bytes` are then among `memory_bytes`."""
    ranks: int
    """Ranks with samples of their own; ranks that share samples count as one, with all their devices."""
    devices_per_rank: int = 1
    inference_share: float
    training_share: float
    samples: int
    epochs: int
    max_steps: int | None = None
    mean_tokens: int
    longest_tokens: int
    supervised_share: float
    samples_per_step: int
    micro_batches: int
    generator_slots: int
    budget_bytes: int | None
    """Of the store; None: as much as the samples in flight need."""
    link_bytes_per_s: float | None
    """Bandwidth of a machine's network if hidden states cross it; None if they stay on one machine."""
    store_machines: int = 1
    """Those that hold a part of the store, and whose networks share the stream: the trainer's."""
    memory_bytes: int
    """Memory of one rank's device; 0 if unknown."""
    host_bytes: int = 0
    """Memory of the machine with all GPUs; 0 if unknown, or if there are several machines."""
    sharing: SharingMode = "apart"
    sharing_why: str = ""
    rounds: int = 0
    """Turns of each side, with `alternate`."""
    answers: Answers | None = None
    """None without data.regeneration, and where it is done."""
    assumptions: tuple[str, ...] = ()
    learned: str = ""
    """What an earlier run of this target and draft says about twice its data; empty: there was none."""

    @property
    def unit(self) -> str:
        return "GPU" if self.device.is_gpu else "core"

    @property
    def devices(self) -> int:
        both = (self.inference_devices, self.training_devices)
        return sum(both) if self.sharing == "apart" else max(both)

    @property
    def generator_bytes(self) -> int:
        """Memory that a generator needs of each of its GPUs."""
        return self._generator(generator_memory)

    @property
    def static_bytes(self) -> int:
        """The part of `generator_bytes` for weights and KV cache."""
        return self._generator(generator_static)

    def _generator(self, part: Callable[..., int]) -> int:
        precision, devices = self.inference_precision, self.devices_per_generator
        return part(self.target, precision, self.longest_tokens, devices, self.attention_groups)

    def holds_target(self, devices: int) -> bool:
        """Whether `devices` GPUs hold a copy of the target, in SGLang with a KV cache for the longest sample."""
        precision, groups = self.inference_precision, min(self.attention_groups, devices)
        if self.serves and self.quantizes:  # SGLang loads the weights as they are stored, and quantizes them then
            return held_static(self.target, precision, 0, devices, groups) <= int(self.memory_bytes * TARGET_SHARE)
        tokens = self.longest_tokens if self.serves else 0
        return held_static(self.target, precision, tokens, devices, groups) <= self.static_room(devices)

    def static_room(self, devices: int) -> int:
        """Bytes of each of a generator's `devices` that weights, and in SGLang its KV cache, may take."""
        if not self.serves:
            return int(self.memory_bytes * TARGET_SHARE)
        if self.sharing == "share":  # the planner then sets the engine's share
            return self.memory_bytes - (self.generator_bytes - self.static_bytes)
        share = self.engine_share or (
            engine_static(self.memory_bytes, devices, self.engine_chunk_tokens) / self.memory_bytes
        )
        # SGLang takes the share of what is free when it loads the weights, after CUDA and NCCL have taken theirs.
        return max(0, int((self.memory_bytes - RESERVED) * share))

    @property
    def rank_bytes(self) -> int:
        """Memory of a device that a trainer rank has for itself; 0 if unknown."""
        generator = self.generator_bytes if self.sharing == "share" else 0
        return max(0, self.memory_bytes - generator - (self.host_needs if self.unified else 0))

    @property
    def obstacle_to_share(self) -> str:
        """What of the GPUs, besides their memory, keeps generators and trainer from using them at once; empty: nothing.

        The trainer's are the first ones. SGLang refuses a copy of the target on GPUs whose free memory differs.
        """
        if self.exclusive:
            return "the compute mode of this machine's GPUs is Exclusive Process (`nvidia-smi -c DEFAULT` changes it)"
        starts = (index * self.inference_devices // self.generators for index in range(self.generators))
        first = max(start for start in starts if start < self.training_devices)
        trained = self.training_devices - first
        if not self.serves or trained >= self.devices_per_generator or not trained % self.devices_per_copy:
            return ""
        return (
            f"the trainer would take memory of {trained % self.devices_per_copy} of the {self.devices_per_copy} GPUs "
            "that hold a copy of the target, and SGLang wants as much free memory on each (pools.training_gpus)"
        )

    @property
    def micro_batch(self) -> tuple[int, ...]:
        """Lengths of the dearest micro-batch: the longest sample among others of mean length."""
        count = -(-self.samples_per_step // (self.ranks * self.micro_batches))
        return (self.longest_tokens, *(self.mean_tokens,) * (count - 1))

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory for a rank's samples: those of the step in training and of the prefetched steps.

        0 where samples arrive in GPU memory, and on CPUs, where `RankMemory` counts them. torch rounds the size of a
        pinned tensor up to a power of two.
        """
        setting = self.setting
        if setting.on_device or not self.device.is_gpu:
            return 0
        tokens, aux = -(-sum(self.micro_batch) // setting.context), setting.aux_count
        rows = (aux, 1, int(setting.embedded))
        parts = (tokens * self.bytes_per_token * share // sum(rows) for share in rows)
        micro_batch = sum(1 << (nbytes - 1).bit_length() for nbytes in parts if nbytes)
        return (setting.prefetch_steps + 2) * self.micro_batches * micro_batch

    @property
    def store_bytes(self) -> int:
        """Of the samples in flight, each as long as the longest."""
        prefetched = self.setting.prefetch_steps
        in_flight = samples_in_flight(self.samples_per_step, self.ranks, prefetched, self.generator_slots)
        return in_flight * self.longest_tokens * self.bytes_per_token

    @property
    def host_needs(self) -> int:
        """Host memory for samples: pinned memory of all ranks, and the store, unless it consists of files."""
        stored = 0 if self.rounds else min(self.store_bytes, self.budget_bytes or self.store_bytes)
        return self.pinned_bytes * self.ranks * self.setting.context + stored

    @property
    def bytes_per_token(self) -> int:
        setting = self.setting
        return setting.stored_bytes_per_token(self.target.hidden_size)


class Plan(Record):
    """The planned speed, memory, duration and cost of a job."""

    job: Job
    prefill_flops: float
    """FLOPs of a sample of mean length."""
    draft_flops: float
    sides: Sides
    present: Split
    memory: RankMemory
    longest_sample: int | None
    """Tokens of the longest sample that a rank can train; None if the device's memory is unknown."""
    target_bytes: int
    """The target's weights on the GPUs of one generator."""
    store_bytes: int
    traffic: Traffic
    checkpoint_bytes: int

    @property
    def best(self) -> Split | None:
        return best_split(self.sides, self.job.devices)

    @property
    def trained_samples(self) -> int:
        job = self.job
        whole = job.samples * job.epochs
        return whole if job.max_steps is None else min(whole, job.max_steps * job.samples_per_step)

    @property
    def seconds(self) -> float:
        """Duration of capture and training, without regeneration, benchmark and startup."""
        return self.trained_samples / self.present.samples_per_s + self.job.rounds * SWITCH_S

    @property
    def regenerated_per_s(self) -> float | None:
        """Tokens of answers per second; None where none are generated."""
        job = self.job
        return job.answers and job.answers.tokens_per_s(
            job.target, job.inference_precision, job.device, job.inference_share
        )

    @property
    def regeneration_s(self) -> float:
        """Duration of regeneration, before capture and training."""
        rate, answers = self.regenerated_per_s, self.job.answers
        return answers.before * self.job.samples * answers.answer_tokens / rate if rate and answers else 0.0

    @property
    def device_hours(self) -> float:
        """Of everything; regeneration holds the inference devices alone."""
        return (self.seconds * self.job.devices + self.regeneration_s * self.job.inference_devices) / 3600

    @property
    def cost(self) -> float:
        return self.device_hours * self.job.device.price_per_hour


def make_plan(job: Job) -> Plan:
    """Work the job out; nothing is refused here (see `infra.planner.refusals`)."""
    prefill = prefill_flops(job.target, job.mean_tokens, job.setting.top_token)
    how = (job.supervised_share, job.setting.whole_head, job.setting.recompute)
    draft = draft_flops(job.draft, job.target, job.mean_tokens, *how)
    if job.setting.muon:  # every rank orthogonalises all matrices
        draft += muon_flops(job.draft, job.target) * job.ranks / job.samples_per_step
    sample_bytes = job.bytes_per_token * job.mean_tokens
    peak, training_peak = job.device.peak[job.inference_precision], job.device.peak[job.setting.precision]
    prefilled = peak * job.inference_share * job.devices_per_generator / prefill
    sides = Sides(
        per_generator=min(prefilled, _answered(job)) if job.answers and job.answers.before < 1 else prefilled,
        per_rank=training_peak * job.training_share * job.devices_per_rank / draft,
        samples_per_step=job.samples_per_step,
        devices_per_generator=job.devices_per_generator,
        devices_per_rank=job.devices_per_rank,
        context=job.setting.context,
        transport=job.link_bytes_per_s * job.store_machines / sample_bytes if job.link_bytes_per_s else None,
    )
    return _with_sides(job, sides, prefill, draft)


def _answered(job: Job) -> float:
    """Samples per second of a generator whose target answers them first."""
    answers, generators = job.answers, max(1, job.inference_devices // job.devices_per_generator)
    assert answers is not None
    rate = answers.tokens_per_s(job.target, job.inference_precision, job.device, job.inference_share)
    return rate / answers.answer_tokens / generators


def _with_sides(job: Job, sides: Sides, prefill: float, draft: float) -> Plan:
    present = split(sides, job.inference_devices, job.training_devices, job.sharing != "apart")
    receiving, memory_bytes = job.ranks * job.setting.context, job.rank_bytes
    return Plan(
        job=job,
        prefill_flops=prefill,
        draft_flops=draft,
        sides=sides,
        present=present,
        memory=rank_memory(job.draft, job.target, job.setting, job.micro_batch),
        longest_sample=longest_sample(job.draft, job.target, job.setting, memory_bytes) if memory_bytes else None,
        target_bytes=job.target.weight_bytes(job.inference_precision),
        store_bytes=job.store_bytes,
        traffic=traffic(
            present.samples_per_s, job.mean_tokens, job.bytes_per_token, job.generators, receiving, job.store_machines
        ),
        checkpoint_bytes=job.draft.parameters * CHECKPOINT_BYTES_PER_PARAMETER,
    )


def corrected(plan: Plan, rates: SideRates) -> Plan | None:
    """The plan with a run's measured rates instead of the assumed ones; None before both sides were measured."""
    job = plan.job
    found = measured_sides(rates, job.mean_tokens, plan.sides)
    if found is None:
        return None
    peak, training_peak = job.device.peak[job.inference_precision], job.device.peak[job.setting.precision]
    shares = {
        "inference_share": found.per_generator * plan.prefill_flops / (peak * job.devices_per_generator),
        "training_share": found.per_rank * plan.draft_flops / (training_peak * job.devices_per_rank),
    }
    return _with_sides(job.model_copy(update=shares), found, plan.prefill_flops, plan.draft_flops)


def comparison(plan: Plan, rates: SideRates) -> dict[str, str]:
    """Planned and measured rates of both sides, and the best split by the measured ones; empty before there are any."""
    now = corrected(plan, rates)
    if now is None:
        return {}
    told = {}
    for side in ("inference", "training"):
        measured, planned = (getattr(each.present, side) for each in (now, plan))
        told[side] = f"{figure(measured)} samples/s measured, {figure(planned)} planned"
        if side == "inference" and plan.job.answers and plan.job.answers.before < 1:
            told[side] += ", answers included"  # decoding is no matter of the peak
        else:
            shares = (getattr(each.job, f"{side}_share") for each in (now, plan))
            told[side] += ": {:.1%} of the peak in place of {:.0%}".format(*shares)
    return told | {"split": advice(now.sides, now.present, now.job.unit)}


def read_plan(file: Path) -> Plan | None:
    """A run's plan, or None where there is none, or one of another version of Draftsmith: nothing else needs it."""
    with suppress(FileNotFoundError, Refusal):
        return Plan.read(file)
    return None


def memory_left(job: Job, memory: RankMemory) -> int:
    """Bytes that a rank's device has left; less than 0: it does not fit."""
    return usable(job.rank_bytes) - memory.total
