"""Which divisions of a run among machines and GPUs can work."""

from infra.config import PoolsConfig
from infra.quantities import plural
from infra.refusal import Refusal
from models.config.generator import GeneratorConfig
from models.config.training import TrainingConfig


def check_machines(pools: PoolsConfig, training: TrainingConfig, generator: GeneratorConfig) -> None:
    """Raise Refusal for a division that cannot work, with the setting to change."""
    for setting, machines in (
        ("training_machines", pools.training_machines),
        ("machines_per_generator", pools.machines_per_generator),
    ):
        if machines > 1 and pools.kind == "local":
            raise Refusal(f"pools.{setting} is {machines}, and pools.kind=local is one: set it to ray or slurm")
    if training.ranks % pools.training_machines:
        raise Refusal(
            f"training.ranks is {training.ranks}, and pools.training_machines={pools.training_machines} share them "
            "evenly: make it a multiple"
        )
    if pools.machines_per_generator > 1:
        _check_generators(pools, generator)
    if generator.engine == "sglang":
        if pools.inference_gpus:
            _check_share(pools.inference_gpus, generator)
        _check_groups(pools, generator)


def _check_share(gpus: int, generator: GeneratorConfig) -> None:
    """Refuse targets divided among different numbers of GPUs, and servers that want more than a generator has.

    Where there are more generators than GPUs, several have the same one.
    """
    count, sglang = generator.count, generator.sglang
    if sglang.tensor_parallel is None and gpus >= count and gpus % count:
        raise Refusal(
            f"pools.inference_gpus={gpus}, generator.count={count}: SGLang divides the target among the GPUs of a "
            f"generator, and each has equally many: make inference_gpus {count}, {2 * count} or another multiple of "
            f"{count}, or lower count"
        )
    share, copies = max(1, gpus // count), sglang.data_parallel
    ranks = sglang.tensor_parallel or max(1, share // copies)
    if copies * ranks > share:
        raise Refusal(
            f"generator.sglang wants {plural(copies * ranks, 'GPU')} for each server (data_parallel {copies} times "
            f"tensor_parallel {ranks}), and a generator has {plural(share, 'GPU')} (pools.inference_gpus, "
            "generator.count): lower data_parallel or tensor_parallel, or give it more"
        )


def _check_groups(pools: PoolsConfig, generator: GeneratorConfig) -> None:
    """Refuse groups into which the ranks of a copy of the target cannot be divided."""
    sglang = generator.sglang
    ranks = sglang.tensor_parallel or max(1, pools.inference_gpus // generator.count // sglang.data_parallel)
    for name in ("attention_data_parallel", "expert_parallel"):
        groups = getattr(sglang, name) or 1
        if ranks % groups:
            raise Refusal(
                f"generator.sglang.{name} is {groups}, and a copy of the target has {plural(ranks, 'rank')} "
                "(generator.sglang.tensor_parallel, or pools.inference_gpus per generator): make it a divisor"
            )


def _check_generators(pools: PoolsConfig, generator: GeneratorConfig) -> None:
    machines, sglang = pools.machines_per_generator, generator.sglang
    given = f"pools.machines_per_generator is {machines}"
    if generator.engine != "sglang":
        raise Refusal(f"{given}, and generator.engine={generator.engine} uses one: set it to sglang")
    if sglang.data_parallel > 1:
        raise Refusal(
            f"{given}, and generator.sglang.data_parallel={sglang.data_parallel} are whole copies: set it to 1, and "
            "have more generators (generator.count)"
        )
    parts = machines * generator.count
    if pools.inference_gpus % parts:
        raise Refusal(
            f"{given}, generator.count {generator.count}, and pools.inference_gpus={pools.inference_gpus} are dealt "
            f"out evenly among them: make it a multiple of {parts}"
        )
    if (sglang.tensor_parallel or machines) % machines:
        raise Refusal(
            f"{given}, and generator.sglang.tensor_parallel={sglang.tensor_parallel} ranks are dealt out evenly among "
            "them: make it a multiple, or leave it out"
        )
    if not (pools.inference_gpus or sglang.tensor_parallel):
        raise Refusal(f"{given}: without GPUs, generator.sglang.tensor_parallel has to say how many ranks they have")
