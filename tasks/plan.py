"""From a recipe to the job that the planner works out: shapes, devices, and what is assumed where nobody knows yet.

No Prefect and no torch: `draftsmith retrain RECIPE --plan` answers at once, on CPUs once a core's speed is measured.
"""

import json
from contextlib import suppress
from pathlib import Path

from infra.files.run_folder import newest_runs
from infra.planner.answers import FREE_SHARE, Answers
from infra.planner.devices import CPU, DEVICES, Device, device_named
from infra.planner.memory import Setting, engine_static
from infra.planner.plan import Job, Plan, make_plan
from infra.planner.refusals import refusals
from infra.planner.shapes import TargetShape, read_target_shape
from infra.planner.sharing import choose_sharing
from infra.pools.gpus import Gpu, read_gpus
from infra.pools.local import LocalPools, refuse_unknown_gpus
from infra.pools.run_pools import pool_specs
from infra.processes.control_groups import cores, memory
from infra.quantities import figure, plural
from infra.records.data_path import SamplesRecord, TargetRecord, TrainingResult
from infra.refusal import Refusal
from infra.settings import expanded, runs_folder
from infra.sglang.config import decoding_requests
from infra.transport.choice import round_bytes
from models.config.data import LIVE, PLAIN_BATCH
from models.config.division import check_division
from models.config.recipe import RunConfig, check_layers
from models.config.target_settings import read_settings, read_shape
from tasks.core_rates import core_rates

READ_BYTES = 4 * 2**20
"""Bytes of a local .jsonl file that are read to estimate its line length."""
PYTHON_DOCS = "python-docs"
BYTES_OF_TOKEN = 4.0
"""Bytes per token of text with its JSON. Assumed."""
SAMPLES = 100_000
"""Number of samples if it is unknown."""


def plan_recipe(config: RunConfig, target: TargetRecord | None = None, samples: SamplesRecord | None = None) -> Plan:
    """The plan of a recipe; of a run, with its target's and samples' own figures in place of those that are assumed.

    Raises Refusal where the target's shape is not to be found out, with the remedy.
    """
    plan = make_plan(_job(config, _shape(config, target), samples))
    mode, why = choose_sharing(config.pools, config.plan.gpus or len(LocalPools().gpus), plan)
    changes: dict[str, object] = {"sharing": mode, "sharing_why": why}
    if mode == "alternate":
        job = plan.job
        epoch_bytes = job.samples * job.mean_tokens * job.bytes_per_token
        kept = kept_checkpoints(config, plan)
        size = max(1, round_bytes(config.transport, runs_folder(), epoch_bytes, kept, plan.store_bytes))
        changes |= {"budget_bytes": size, "rounds": job.epochs * -(-epoch_bytes // size)}
    return make_plan(plan.job.model_copy(update=changes))


def _shape(config: RunConfig, target: TargetRecord | None) -> TargetShape:
    """The shape of a run's target, or plan.target where its `config.json` does not tell; of a recipe, plan.target."""
    given = config.plan.target
    if target is None:
        return given or read_shape(config.target)
    try:
        return read_target_shape(Path(target.path) / "config.json")
    except Refusal:
        if given is None:
            raise
        return given


def checked_plan(config: RunConfig) -> Plan:
    """The recipe's plan. Raises Refusal for what is impossible, with the nearest recipe that is possible."""
    check_gpus(config)
    plan = plan_recipe(config)
    target = plan.job.target
    check_layers(config.target.aux_layer_ids, target.num_layers)
    _check_copies(config)
    size = config.draft.vocabulary_size(target.vocab_size)
    if size > target.vocab_size:
        raise Refusal(f"draft.vocab_size {size} exceeds the target's vocabulary: set it to at most {target.vocab_size}")
    if obstacles := refusals(plan):
        raise Refusal("this recipe cannot run:\n" + "\n".join(f"  {obstacle}" for obstacle in obstacles))
    return plan


def _check_copies(config: RunConfig) -> None:
    """Raise Refusal where the GPUs of a copy do not divide the target.

    plan.target has no heads. Where it stands for a `config.json` that cannot be read, preflight checks them.
    """
    if config.own_engine != "sglang" or (config.plan.target and config.gpus_per_copy == 1):
        return  # which divides every target
    try:
        settings = read_settings(config.target)
    except Refusal:
        if config.plan.target is None:
            raise
    else:
        check_division(config, settings)


def check_gpus(config: RunConfig) -> None:
    """Raise Refusal for GPUs that this machine does not have, in the words of the lease, before anything is prepared.

    Nothing is checked on a machine without GPUs, or where the plan is for another one (plan.gpus, plan.device).
    """
    if _leases_own_gpus(config) and config.plan.gpus is None and config.plan.device is None:
        refuse_unknown_gpus()
    gpus = _planned_gpus(config)
    if not gpus:
        return
    specs = pool_specs(config.pools, config.generator.count)
    # Only a plan can tell `share` from `alternate`, and both lease the same GPUs.
    is_shared = config.generator.live is not None or choose_sharing(config.pools, gpus, None)[0] != "apart"
    LocalPools().check([max(specs, key=lambda spec: spec.gpus)] if is_shared else specs)


def _setting(config: RunConfig, target: TargetShape, device: Device) -> Setting:
    training = config.training
    return Setting(
        aux_count=len(config.target.aux_layer_ids),
        stored=config.generator.stored_dtype,
        precision=config.training_dtype,
        top_token=config.top_token(target.vocab_size),
        embedded=config.embedded,
        whole_head=config.whole_head(target.vocab_size),
        chunk_tokens=training.loss_chunk_tokens,
        muon=training.optimizer == "muon",
        recompute=training.recompute,
        prefetch_steps=training.prefetch_steps,
        divided=training.ranks if training.sharded else 1,
        context=training.context_parallel_size,
        on_device=config.transport.kind == "mooncake" and config.transport.receive != "host",
        one_memory=not device.is_gpu,
    )


def _job(config: RunConfig, target: TargetShape, samples: SamplesRecord | None) -> Job:
    plan, training, generator, pools = config.plan, config.training, config.generator, config.pools
    assumed: list[str] = []
    device = _device(config, assumed)
    num_samples, mean, longest = _lengths(config, samples, assumed)
    inference, train, per_generator = _devices(config, device, assumed)
    inference_share, training_share = _shares(config, device, assumed)
    # Without GPUs, this machine's memory if the trainer runs on it.
    own_memory = memory() if pools.kind == "local" else 0
    own = _leasable() if device.is_gpu and pools.kind == "local" and plan.device is None else []
    aux = len(config.target.aux_layer_ids)
    return Job(
        name=config.name,
        target=target,
        draft=config.draft.shape(target, aux, config.training_dtype),
        setting=_setting(config, target, device),
        inference_precision=config.capture_dtype,
        device=device,
        inference_devices=inference,
        training_devices=train,
        generators=generator.count,
        devices_per_generator=per_generator,
        generator_machines=pools.machines_per_generator,
        machine_devices=max(plan.gpus_per_machine, _own_gpus(config)) if device.is_gpu else 0,
        own_devices=_planned_gpus(config),
        serves=generator.engine == "sglang",
        quantizes=generator.sglang.quantization is not None and not target.bytes_per_weight,
        captures_elsewhere=generator.live is not None,
        engine_share=generator.sglang.memory_fraction,
        engine_chunk_tokens=generator.sglang.chunked_prefill_tokens,
        attention_groups=generator.sglang.attention_data_parallel if generator.engine == "sglang" else 1,
        devices_per_copy=config.gpus_per_copy,
        exclusive=any(gpu.most_processes == 1 for gpu in own),
        unified=any(gpu.unified for gpu in own) and not plan.memory_gb,
        ranks=training.data_parallel_size,
        devices_per_rank=max(1, train // training.data_parallel_size),
        inference_share=inference_share,
        training_share=training_share,
        samples=num_samples,
        epochs=training.epochs,
        max_steps=training.max_steps,
        mean_tokens=mean,
        longest_tokens=longest,
        supervised_share=samples.supervised_share if samples else plan.supervised_share,
        samples_per_step=min(training.samples_per_step, num_samples),
        micro_batches=training.micro_batches,
        generator_slots=generator.slots,
        budget_bytes=budget_mib * 2**20 if (budget_mib := config.transport.budget_mib) else None,
        link_bytes_per_s=_link(config, inference + train),
        store_machines=config.pools.training_machines,
        memory_bytes=device.memory_bytes or own_memory,
        host_bytes=own_memory if own else 0,
        answers=_answers(config, device, inference, per_generator, mean, assumed, prepared=samples is not None),
        assumptions=tuple(assumed),
        learned=_learned(config),
    )


def _own_gpus(config: RunConfig) -> int:
    """GPUs of this machine, if it is the one that the pools are on."""
    return len(LocalPools().gpus) if config.pools.kind == "local" else 0


def _leases_own_gpus(config: RunConfig) -> bool:
    return config.pools.kind == "local" and bool(config.pools.inference_gpus or config.pools.training_gpus)


def _planned_gpus(config: RunConfig) -> int:
    """GPUs of this machine if the plan is for them; 0 where it assumes others (plan.gpus, plan.device)."""
    own, plan = _own_gpus(config), config.plan
    return own if plan.device is None and plan.gpus in (None, own) else 0


def _link(config: RunConfig, devices: int) -> float | None:
    """Bytes per second of a machine's network; None if hidden states stay on one machine."""
    plan, pools = config.plan, config.pools
    has_gpus = bool(pools.inference_gpus or pools.training_gpus)
    crossing = pools.kind != "local" and (devices > plan.gpus_per_machine or not has_gpus)
    return plan.link_gbit * 1e9 / 8 if crossing else None


def _learned(config: RunConfig) -> str:
    """What the latest finished run of this target and draft, in runs_folder(), says about more data; empty: none."""
    recipe = config.model_dump(mode="json")
    for folder in newest_runs(runs_folder()):
        # A run that is removed meanwhile, damaged or of another version says nothing, and must not end this one.
        with suppress(OSError, ValueError):
            earlier = json.loads(folder.config.read_text())
            if folder.training.is_file() and all(earlier.get(part) == recipe[part] for part in ("target", "draft")):
                trained = TrainingResult.read(folder.training)
                if trained.more_data is not None:
                    return f"after {plural(trained.tokens, 'token')} in run {folder.name}: {trained.more_data.in_words}"
    return ""


def _answers(
    config: RunConfig,
    device: Device,
    inference: int,
    per_generator: int,
    mean_tokens: int,
    assumed: list[str],
    *,
    prepared: bool,
) -> Answers | None:
    """What regeneration asks of the target; None without it, and where it is done (`prepared`)."""
    settings, generator, plan = config.data.regeneration, config.generator, config.plan
    if settings is None or (prepared and not settings.capture):
        return None
    serves, requests = generator.engine == "sglang", PLAIN_BATCH
    if serves and settings.capture:
        requests = generator.sglang.requests_in_flight
    elif serves:
        requests = decoding_requests(device.memory_bytes) if device.is_gpu else generator.sglang.requests_in_flight
    # Elsewhere than on this machine only one generator's devices are used, and transformers uses one GPU.
    memory_share = FREE_SHARE
    if serves and device.memory_bytes:
        static = engine_static(device.memory_bytes, config.gpus_per_copy, generator.sglang.chunked_prefill_tokens)
        memory_share = generator.sglang.memory_fraction or static / device.memory_bytes
    usable = inference if serves and config.pools.kind == "local" else per_generator
    group = config.gpus_per_copy if serves and device.is_gpu else per_generator
    answer = min(plan.answer_tokens or mean_tokens, settings.max_new_tokens)
    assumed.append(
        f"regenerated answers of {answer:,} tokens (plan.answer_tokens), decoded at {plan.decode_share:.0%} of the "
        "memory bandwidth (plan.decode_share)"
    )
    return Answers(
        prompt_tokens=max(1, mean_tokens - answer),
        answer_tokens=answer,
        copies=max(1, usable // group) if device.is_gpu else 1,
        devices_per_copy=group,
        most_requests=requests,
        bandwidth_share=plan.decode_share,
        memory_share=memory_share,
        before=0.0 if prepared else config.data.answered_before,
    )


def kept_checkpoints(config: RunConfig, plan: Plan) -> int:
    """Bytes of the checkpoints that a run keeps, of the next one, and of the export."""
    return (config.training.keep_checkpoints + 2) * plan.checkpoint_bytes


def on_this_machine(config: RunConfig) -> RunConfig:
    """The recipe with this machine's GPUs in place of those its plan assumes. Raises Refusal if they do not answer."""
    gpus, leases = _own_gpus(config), _leases_own_gpus(config)
    if leases:
        refuse_unknown_gpus()
    changes: dict[str, object] = {"gpus": gpus or None}
    if gpus and (not leases or read_gpus()):
        changes |= {"device": None, "memory_gb": None}
    return config.model_copy(update={"plan": config.plan.model_copy(update=changes)})


def _device(config: RunConfig, assumed: list[str]) -> Device:
    """The device whose figures are used."""
    plan, pools, changes = config.plan, config.pools, {}
    if plan.device is not None:
        device = DEVICES[plan.device]
    elif not (pools.inference_gpus or pools.training_gpus):
        device = DEVICES[CPU]
        if not plan.peak_tflops:
            changes["peak"] = core_rates()
            assumed.append(
                f"no GPUs: a core reaches {figure(changes['peak'][config.training_dtype] / 1e9)} GFLOP/s in "
                f"{config.training_dtype} matrix products, measured on this machine (plan.peak_tflops)"
            )
    elif pools.kind == "local" and (own := min(_leasable(), key=lambda gpu: gpu.total, default=None)):
        known = device_named(own.name)
        device, changes["memory_bytes"] = known or DEVICES["H100"], own.total
        unknown = "" if known else ", with the speed and price of an H100 (plan.peak_tflops, plan.price_per_hour)"
        assumed.append(f"the GPUs are {own.name}: this machine's{unknown}")
    else:
        device = DEVICES["H100"]
        assumed.append("the GPUs are H100: assumed (plan.device)")
    if plan.memory_gb:
        changes["memory_bytes"] = int(plan.memory_gb * 10**9)
    if plan.peak_tflops:
        changes["peak"] = dict.fromkeys(device.peak, plan.peak_tflops * 1e12)
    if plan.price_per_hour is not None:
        changes["price_per_hour"] = plan.price_per_hour
    return device.model_copy(update=changes)


def _leasable() -> list[Gpu]:
    """The GPUs of this machine that runs may lease."""
    permitted, inventory = LocalPools().gpus, read_gpus()
    return [gpu for gpu in inventory.devices if gpu.uuid in permitted] if inventory else []


def _devices(config: RunConfig, device: Device, assumed: list[str]) -> tuple[int, int, int]:
    """GPUs of inference, of training and of one generator, or cores.

    A generator in transformers uses one GPU, SGLang all that it is given.
    """
    generator, pools, training = config.generator, config.pools, config.training
    if device.is_gpu and (pools.inference_gpus or pools.training_gpus):
        given = max(1, pools.inference_gpus // generator.count)
        used = given if generator.engine == "sglang" else 1
        if used < given:
            assumed.append(f"a generator leases {given} GPUs and uses one (generator.engine=transformers)")
        return max(1, pools.inference_gpus), max(1, pools.training_gpus), used
    half = max(1, cores() // 2)
    if generator.threads is None or training.threads is None:
        assumed.append(
            f"cores are divided evenly ({half} each side) where generator.threads or training.threads say nothing"
        )
    capture = generator.threads or half
    return capture * generator.count, (training.threads or half) * training.ranks, capture


def _shares(config: RunConfig, device: Device, assumed: list[str]) -> tuple[float, float]:
    """Of the device's peak that inference and training reach."""
    inference = config.plan.inference_share or device.inference_share
    training = config.plan.training_share or device.training_share
    source = "published for other software" if device.is_gpu else "those of the quickstart"
    assumed.append(
        f"prefill reaches {inference:.0%} and draft steps {training:.0%} of the peak (plan.inference_share, "
        f"plan.training_share): {source}, and replaced by what a run measures"
    )
    return inference, training


def _lengths(config: RunConfig, record: SamplesRecord | None, assumed: list[str]) -> tuple[int, int, int]:
    """Number of samples, and tokens of a mean one and of the longest: known if prepared, otherwise estimated."""
    plan, data = config.plan, config.data
    if record:
        return record.train_samples, max(1, round(record.train_tokens / max(1, record.train_samples))), record.longest
    lines, tokens = _look_into(data.source)
    samples = plan.samples or data.max_samples or (lines and max(1, int(lines * (1 - data.heldout_share)))) or SAMPLES
    likely = data.max_tokens if data.overlong == "split" else tokens or data.max_tokens // 2
    mean = min(plan.mean_tokens or likely, data.max_tokens)
    is_file = data.source not in (PYTHON_DOCS, LIVE) and "://" not in data.source
    if is_file and not expanded("data.source", data.source).exists():
        assumed.append(f"data.source {data.source} is not here (looked in {Path.cwd()}): a run needs it")
    if data.source == LIVE:
        assumed.append("users ask as fast as samples are captured: in truth a run lasts as long as they take")
    if not plan.samples and not data.max_samples:
        assumed.append(
            f"{plural(samples, 'sample')}: " + (f"the lines of {data.source}" if lines else "assumed (plan.samples)")
        )
    if not plan.mean_tokens:
        how = f"the bytes of {data.source}" if tokens and data.overlong != "split" else "data.max_tokens"
        assumed.append(f"samples of {mean:,} tokens: estimated from {how} (plan.mean_tokens)")
    return samples, mean, data.max_tokens


def _look_into(source: str) -> tuple[int, int]:
    """Lines of a local .jsonl and tokens of each, told by its beginning; zeros for anything else."""
    file = expanded("data.source", source)
    if file.suffix != ".jsonl" or not file.is_file():
        return 0, 0
    with file.open("rb") as opened:
        head = opened.read(READ_BYTES)
    lines = max(1, head.count(b"\n"))
    of_line = len(head) / lines
    return max(1, round(file.stat().st_size / of_line)), max(1, round(of_line / BYTES_OF_TOKEN))
