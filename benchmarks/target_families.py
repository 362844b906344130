"""Tiny random models of the real architectures, one per target family, with the tiny target's tokenizer.

Layers of every kind that the family has are there, and sliding windows are shorter than the texts.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

VOCABULARY = 1024
HIDDEN = 64
LAYERS = 4
WINDOW = 16
PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    # With the usual 0.02 logits are nearly equal, and a wrong hidden state changes no token.
    "initializer_range": 0.15,
}
HEADS: dict[str, Any] = {"head_dim": 16}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
MLA: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
ALTERNATING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SIGHT_QWEN: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
}
QWEN_IDS: dict[str, Any] = {
    "image_token_id": 1020,
    "video_token_id": 1021,
    "vision_start_token_id": 1022,
    "vision_end_token_id": 1023,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
QWEN35_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.25,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
}


GEMMA4: dict[str, Any] = {
    "pad_token_id": 0,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SIGHT_GEMMA4: dict[str, Any] = {
    "vision_config": SIGHT | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
    "image_token_id": 1020,
    "video_token_id": 1021,
    "boi_token_id": 1022,
    "eoi_token_id": 1023,
    "audio_token_id": 1019,
}


PUBLISHED_MOE: dict[str, Any] = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Of DeepSeek's configurations."""


@dataclass(frozen=True)
class Family:
    """A target family as it is published."""

    title: str
    architecture: str
    """Class in transformers, and the name in `config.json`."""
    settings: dict[str, Any]
    """What differs from `PLAIN`; of the text model where there is one inside."""
    wrapper: dict[str, Any] = field(default_factory=dict)
    """Settings of the multimodal configuration around the text model's; empty for text models."""
    published_as: dict[str, Any] = field(default_factory=dict)
    """Entries of the published `config.json` that transformers 5 does not write or know, and SGLang reads."""


FAMILIES: dict[str, Family] = {
    "llama3": Family("Llama 3", "LlamaForCausalLM", HEADS | {"rope_parameters": LLAMA3_ROPE}),
    "llama4": Family(
        "Llama 4 (multimodal)",
        "Llama4ForConditionalGeneration",
        HEADS
        | {
            "intermediate_size_mlp": 96,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [1, 1, 1, 0],
            "floor_scale": 32,
        },
        {"vision_config": SIGHT | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}},
    ),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_moe": Family("Qwen2-MoE", "Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}},
        QWEN_IDS | {"vision_config": SIGHT_QWEN | {"fullatt_block_indexes": [0]}},
    ),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", HEADS | {"tie_word_embeddings": True}),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3MoeForCausalLM", HEADS | EXPERTS),
    "qwen3_next": Family(
        *("Qwen3-Next", "Qwen3NextForCausalLM", HEADS | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32}),
        published_as={"full_attention_interval": 4},
    ),
    "qwen3_5": Family(
        "Qwen3.5",
        "Qwen3_5ForConditionalGeneration",
        HEADS | LINEAR | {"rope_parameters": QWEN35_ROPE},
        QWEN_IDS | {"vision_config": SIGHT_QWEN | {"num_position_embeddings": 16}},
    ),
    "qwen3_5_moe": Family(
        "Qwen3.5-MoE, Qwen3.6-MoE",
        "Qwen3_5MoeForConditionalGeneration",
        HEADS | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32, "rope_parameters": QWEN35_ROPE},
        QWEN_IDS | {"vision_config": SIGHT_QWEN | {"num_position_embeddings": 16}},
    ),
    "qwen3_vl": Family(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        HEADS
        | {
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
                "rope_theta": 5e6,
            }
        },
        QWEN_IDS | {"vision_config": SIGHT_QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
    ),
    "gemma2": Family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        HEADS
        | ALTERNATING
        | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 8.0},
        published_as={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma3_text": Family("Gemma 3 (text)", "Gemma3ForCausalLM", HEADS | ALTERNATING | {"query_pre_attn_scalar": 16}),
    "gemma3": Family(
        "Gemma 3 (multimodal)",
        "Gemma3ForConditionalGeneration",
        HEADS | ALTERNATING | {"query_pre_attn_scalar": 16},
        {
            "vision_config": SIGHT,
            "mm_tokens_per_image": 4,
            "boi_token_index": 1021,
            "eoi_token_index": 1022,
            "image_token_index": 1023,
        },
    ),
    "gemma4": Family(
        "Gemma 4 (multimodal)", "Gemma4ForConditionalGeneration", HEADS | ALTERNATING | GEMMA4, SIGHT_GEMMA4
    ),
    "gemma4_moe": Family(
        "Gemma 4 with experts (multimodal)",
        "Gemma4ForConditionalGeneration",
        HEADS
        | ALTERNATING
        | GEMMA4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        SIGHT_GEMMA4,
    ),
    "gemma4_small": Family(
        "Gemma 4 E2B, E4B (multimodal)",
        "Gemma4ForConditionalGeneration",
        HEADS
        | ALTERNATING
        | GEMMA4
        | {
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 2,
        },
        SIGHT_GEMMA4,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "GptOssForCausalLM",
        HEADS
        | ALTERNATING
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "rope_parameters": YARN},
    ),
    "mistral": Family("Mistral", "MistralForCausalLM", HEADS | {"sliding_window": None}),
    "mistral_7b_v01": Family(
        "Mistral 7B v0.1 (sliding window)", "MistralForCausalLM", HEADS | {"sliding_window": WINDOW}
    ),
    "mixtral": Family("Mixtral", "MixtralForCausalLM", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral3": Family(
        "Mistral 3 (multimodal)",
        "Mistral3ForConditionalGeneration",
        HEADS | {"model_type": "mistral"},
        {"vision_config": {"model_type": "pixtral"} | SIGHT, "image_token_index": 10, "tie_word_embeddings": False},
    ),
    "phi3": Family("Phi-3, Phi-4", "Phi3ForCausalLM", {"partial_rotary_factor": 0.75}),
    "glm4": Family("GLM-4", "Glm4ForCausalLM", HEADS | {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4_moe": Family(
        "GLM-4-MoE", "Glm4MoeForCausalLM", HEADS | ROUTED | {"use_qk_norm": True, "partial_rotary_factor": 0.5}
    ),
    "glm4_moe_lite": Family("GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", MLA | ROUTED),
    "deepseek_v3": Family(
        *("DeepSeek-V3", "DeepseekV3ForCausalLM", MLA | ROUTED | GROUPS | {"rope_parameters": YARN}),
        published_as=PUBLISHED_MOE,
    ),
    "kimi_k2": Family(
        "Kimi-K2",
        "DeepseekV3ForCausalLM",
        MLA | ROUTED | {"rope_parameters": YARN | {"rope_theta": 50_000.0}},
        published_as=PUBLISHED_MOE | {"model_type": "kimi_k2"},
    ),
    "mimo": Family(
        "MiMo", "Qwen2ForCausalLM", {}, published_as={"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    ),
    "olmo2": Family("OLMo 2", "Olmo2ForCausalLM", {}),
    "olmo3": Family("OLMo 3", "Olmo3ForCausalLM", ALTERNATING),
    "granite": Family(
        "Granite",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
        },
    ),
    "smollm3": Family("SmolLM3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}),
    "cohere2": Family("Command R7B", "Cohere2ForCausalLM", ALTERNATING | {"logit_scale": 0.25}),
    "ernie4_5": Family("ERNIE 4.5", "Ernie4_5ForCausalLM", HEADS),
    "exaone4": Family("EXAONE 4", "Exaone4ForCausalLM", ALTERNATING | HEADS),
    "seed_oss": Family("Seed-OSS", "SeedOssForCausalLM", HEADS),
    "minimax_m2": Family(
        "MiniMax-M2",
        "MiniMaxM2ForCausalLM",
        HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        published_as={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
    ),
    "glm_moe_dsa": Family(
        "GLM-5 (sparse attention)",
        "GlmMoeDsaForCausalLM",
        MLA | ROUTED | {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 16},
        published_as=PUBLISHED_MOE,
    ),
    "mimo_v2_flash": Family(
        "MiMo-V2-Flash",
        "MiMoV2FlashForCausalLM",
        ROUTED | ALTERNATING | {"n_shared_experts": None, "head_dim": 24, "v_head_dim": 16},
        published_as=PUBLISHED_MOE,
    ),
    "deepseek_v32": Family(
        "DeepSeek-V3.2 (sparse attention)",
        "DeepseekV32ForCausalLM",
        MLA | ROUTED | {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 16},
        published_as=PUBLISHED_MOE,
    ),
}


def build(family: Family) -> PreTrainedModel:
    """A random model in float32; deterministic."""
    kind = getattr(transformers, family.architecture)
    if family.wrapper:
        config = kind.config_class(text_config=PLAIN | family.settings, **family.wrapper)
    else:
        config = kind.config_class(**PLAIN | family.settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval()
    for name, sinks in model.named_parameters():
        if name.endswith("sinks"):
            # Published in bfloat16, which SGLang keeps them in.
            sinks.data = sinks.data.bfloat16().float()
    return model


def write(family: Family, folder: Path, tokenizer: Path) -> Path:
    """Write the model to `folder`, with the tokenizer in the folder `tokenizer`."""
    model = build(family)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, do_sample=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    if family.published_as:
        settings = json.loads((folder / "config.json").read_text()) | family.published_as
        (folder / "config.json").write_text(json.dumps(settings))
    return folder
