"""Among how many GPUs SGLang divides a copy of the target."""

from collections.abc import Mapping
from typing import Any

from infra.quantities import enumerated
from infra.refusal import Refusal
from models.config.experts import COUNTS
from models.config.recipe import RunConfig


def check_division(config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Raise Refusal where SGLang would end at its start, because a copy's GPUs do not divide the target.

    Every GPU gets as many query heads as the others, and as many key-value heads or one that it shares; of weights in
    fp8 it gets whole blocks. So SGLang 0.5.23 asserts in its model classes and in `quantization/fp8.py`. `settings`:
    the target's `config.json`.
    """
    text = settings.get("text_config") or settings
    heads, sglang = text.get("num_attention_heads"), config.generator.sglang
    # Latent attention keeps no key-value heads.
    keys = heads if text.get("kv_lora_rank") else text.get("num_key_value_heads") or heads
    if config.own_engine != "sglang" or not isinstance(heads, int) or not isinstance(keys, int):
        return  # other numbers in every layer are left to SGLang
    groups, experts = sglang.attention_data_parallel, any(text.get(name) for name in COUNTS)
    width = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
    whole = sglang.expert_parallel or 1 if experts else 1
    block = max((settings.get("quantization_config") or {}).get("weight_block_size") or [1])

    def divides(copy: int) -> bool:
        ranks, parts = copy // groups, max(1, copy // whole)
        of_heads = heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)
        return of_heads and copy % whole == 0 and (block == 1 or copy == 1 or width % (parts * block) == 0)

    fitting = [copy for copy in range(groups, max(groups, config.pools.inference_gpus) + 1, groups) if divides(copy)]
    if config.gpus_per_copy not in fitting:
        blocks = f" and its feed-forward layers of {width} in blocks of {block}" if block > 1 else ""
        possible = f"give a copy {enumerated([str(copy) for copy in fitting], 'or')}" if fitting else "change these"
        raise Refusal(
            f"SGLang cannot divide the target's {heads} attention heads ({keys} of keys and values){blocks} among the "
            f"{config.gpus_per_copy} GPUs of a copy: {possible} "
            "(pools.inference_gpus, generator.count, generator.sglang.tensor_parallel"
            f"{', generator.sglang.expert_parallel' if experts else ''})"
        )
