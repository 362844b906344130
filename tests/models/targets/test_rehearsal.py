"""Architectures are tried at a small size: what cannot be decoded is refused, with the reason, before it is loaded."""

from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    HyperCLOVAXConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3NextConfig,
)

from models.targets.rehearsal import miniature, rehearse

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}


def test_a_cache_that_only_the_model_itself_can_make_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)minimax cannot be captured and decoded.*cache of its own"):
        rehearse(MiniMaxConfig(**SMALL, num_hidden_layers=2, intermediate_size=32, num_local_experts=2))


def test_a_final_norm_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lfm2 cannot be captured and decoded.*no attribute 'norm'"):
        rehearse(Lfm2Config(**SMALL, num_hidden_layers=2, intermediate_size=32, layer_types=["conv", "full_attention"]))


def test_logits_that_the_model_scales_in_a_way_of_its_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SMALL | {"num_hidden_layers": 2, "intermediate_size": 32}
    rehearse(HyperCLOVAXConfig(**sizes, logits_scaling=0.125))
    plain = LlamaForCausalLM.forward

    def doubled(self: LlamaForCausalLM, *arguments: Any, **named: Any) -> Any:
        output = plain(self, *arguments, **named)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(ValueError, match=r"llama cannot be captured.*its logits are scaled in a way of its own"):
        rehearse(LlamaConfig(**sizes))


@pytest.mark.parametrize("kind", [DeepseekV3Config, Gemma3TextConfig, Qwen3NextConfig])
def test_published_sizes_become_small_with_all_kinds_of_layers(kind: type[PretrainedConfig]) -> None:
    """DeepSeek-V3 has dense layers before those with experts."""
    config = kind()
    small = miniature(config, narrow=True)
    dense = getattr(config, "first_k_dense_replace", 0)
    assert dense < small.num_hidden_layers < 8
    assert set(getattr(small, "layer_types", ())) == set(getattr(config, "layer_types", ()))
    assert small.vocab_size == 128
    assert config.num_hidden_layers > 8, "the target's own configuration is left as it is"


def test_few_experts_are_chosen_among_few() -> None:
    experts = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 32}
    rehearse(Gemma4TextConfig(**SMALL, num_hidden_layers=6, intermediate_size=32, global_head_dim=32, **experts))


def test_layers_that_share_keys_and_values_follow_those_that_have_their_own() -> None:
    """Gemma 4 E2B and E4B."""
    sharing = {"num_kv_shared_layers": 18, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}
    rehearse(Gemma4TextConfig(**SMALL, num_hidden_layers=42, intermediate_size=32, global_head_dim=32, **sharing))


def test_errors_of_the_precision_that_the_target_names_refuse_no_architecture() -> None:
    """Qwen3.5's sizes, in which a bfloat16 model with a cache and one without differ by 2 %."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": 48}
    rehearse(Qwen3_5Config(text_config={**sizes, **linear, "num_hidden_layers": 4, "dtype": "bfloat16"}))
