"""Shapes from configurations: parameter counts against published ones, and against the drafts' own modules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

from infra.planner.memory import generator_static
from infra.planner.shapes import TargetShape, read_target_shape, target_shape
from infra.planner.target_files import GEMMA3_TEXT
from models.config.draft import parse_draft_config
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary

QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
}  # fmt: skip
KIMI_K2 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "num_attention_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LLAMA4 = {
    "hidden_size": 5120, "num_hidden_layers": 48, "vocab_size": 202048, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
}  # fmt: skip
SCOUT = LLAMA4 | {"num_local_experts": 16, "interleave_moe_layer_step": 1}
MAVERICK = LLAMA4 | {"num_local_experts": 128, "interleave_moe_layer_step": 2}
GEMMA3_270M = {
    "hidden_size": 640, "num_hidden_layers": 18, "vocab_size": 262144, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3 = {  # as google/gemma-3-{4b,12b,27b}-it are published: text_config leaves out what equals the default
    4: {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240},
    12: {
        "hidden_size": 3840, "num_hidden_layers": 48, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    27: {
        "hidden_size": 5376, "num_hidden_layers": 62, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128,
    },
}  # fmt: skip
MIXED = {"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}} | {
    f"model.layers.{layer}.mlp.experts": {"quant_algo": "W4A16_NVFP4"} for layer in range(3)
}
"""As in nvidia/Qwen3.6-35B-A3B-NVFP4."""
LAYER = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24}
EXPERTS = {"count": 6, "per_token": 2, "intermediate_size": 10, "shared_size": 7}
SIZES = {"q_lora_rank": 9, "kv_lora_rank": 11, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5}
MLA = {"mla": SIZES, "num_kv_heads": 4}
DRAFTS = [
    {"method": "eagle3", "vocab_size": 40, **LAYER},
    {"method": "eagle3", "vocab_size": None, "fc_norm": True, "train_embeddings": True, **LAYER},
    {"method": "eagle3", "vocab_size": 40, "norm_before_fc": True, "shared_head": True, **LAYER},
    {"method": "eagle3", "vocab_size": 40, "layer_types": ["full_attention"] * 3, "qk_norm": True, **LAYER},
    {"method": "eagle3", "vocab_size": 40, "hidden_size": 24, "fc_bias": True, "attention_bias": True, **LAYER},
    {"method": "medusa", "vocab_size": 40, "heads": 3, "layers": 2},
    {"method": "dflash", "layer_types": ["full_attention"] * 2, "fc_norm": True, "attention_bias": True, **LAYER},
    {"method": "dflash2", "vocab_size": 40, "conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 7, **LAYER},
    {"method": "domino", "vocab_size": 40, "gru_hidden_dim": 9, "emb_dim": 7, **LAYER},
    {"method": "dspark", "vocab_size": 40, "markov_rank": 7, "markov_head": "gated", **LAYER},
    {"method": "dspark", "markov_rank": 7, "markov_head": "rnn", "confidence_reads_token": False, **LAYER},
    {"method": "dspark", "markov_rank": 7, "confidence_head": False, **LAYER},
    {"method": "mtp", "family": "mimo", "attention_bias": True, **LAYER},
    {"method": "mtp", "family": "qwen", "qk_norm": True, "gated_attention": True, **LAYER},
    {"method": "mtp", "family": "qwen", **LAYER, "experts": EXPERTS | {"scoring": "softmax"}},
    {"method": "mtp", "family": "deepseek", **LAYER, **MLA, "experts": EXPERTS | {"scoring": "sigmoid"}},
]


@pytest.mark.parametrize(
    ("config", "stored", "active"),
    [
        (QWEN3_8B, 8.2e9, 6.95e9),  # Qwen3's model card: 8.2B, 6.95B without embeddings
        (KIMI_K2, 1.03e12, 31e9),  # Kimi K2's: 1T and 32B activated, the head among them
        (SCOUT, 107.8e9, 15.1e9),  # 109B and 17B with its eyes and, of the active ones, the embeddings
        (MAVERICK, 400.7e9, 15.1e9),
        ({"text_config": GEMMA3_270M, "tie_word_embeddings": True}, 268e6, 100e6),  # Gemma 3's: 170M + 100M
    ],
    ids=["qwen3-8b", "kimi-k2", "llama-4-scout", "llama-4-maverick", "gemma3-270m"],
)
def test_published_sizes(config: dict[str, Any], stored: float, active: float) -> None:
    shape = target_shape(config)
    assert shape.parameters == pytest.approx(stored, rel=0.02)
    assert shape.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("quantization", "nbytes"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, 1.0),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5625),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "mxfp4"}, 0.5625),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED}, 0.5625),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, 0.5625),
        ({"quant_method": "something new"}, 2.0),
        ({}, 2.0),
    ],
)
def test_a_quantized_target_takes_fewer_bytes(quantization: dict[str, Any], nbytes: float) -> None:
    shape = target_shape(KIMI_K2 | {"quantization_config": quantization})
    assert shape.weight_bytes("bfloat16") == int(shape.parameters * nbytes)
    assert generator_static(shape, "bfloat16", 4096, 8) < shape.parameters * nbytes / 8 + 10 * 2**30


def test_data_parallel_attention_divides_a_latent_cache_and_copies_the_weights_of_attention() -> None:
    """Tensor parallelism leaves a latent cache whole on every GPU: with groups each has that of its own requests."""
    shape = target_shape(KIMI_K2)
    assert shape.latent_cache
    one, eight = (generator_static(shape, "bfloat16", 128, 8, groups) for groups in (1, 8))
    chunk = 2 * 8192 * shape.cache_per_token * 2
    assert eight - one == pytest.approx(7 * shape.attention_parameters * 2 / 8 - chunk * 7 / 8, abs=8)
    plain = target_shape(QWEN3_8B)
    assert not plain.latent_cache
    assert generator_static(plain, "bfloat16", 128, 8, 8) > generator_static(plain, "bfloat16", 128, 8)


def test_other_names_of_what_a_target_has(tmp_path: Path) -> None:
    """Gemma 4's of experts per token, and ModelOpt's file of its own (nvidia/DeepSeek-V3.2-NVFP4)."""
    config = {name: value for name, value in KIMI_K2.items() if name != "num_experts_per_tok"} | {"top_k_experts": 8}
    assert target_shape(config) == target_shape(KIMI_K2)
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert read_target_shape(tmp_path / "config.json").bytes_per_weight == 0.5625


@pytest.mark.parametrize(("billions", "stored"), [(4, 3.88e9), (12, 11.77e9), (27, 27.0e9)])
def test_published_gemmas_leave_out_what_equals_the_default(billions: int, stored: float, tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text"} | GEMMA3[billions]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    shape = read_target_shape(tmp_path / "config.json")
    assert (shape.vocab_size, shape.hidden_size) == (262_208, text["hidden_size"])
    assert shape.parameters == pytest.approx(stored, rel=0.01)  # with tied embeddings, without the vision tower


def test_gemmas_defaults_are_those_of_transformers() -> None:
    default = Gemma3TextConfig().to_dict()
    default["rope_theta"] = default["rope_parameters"]["full_attention"]["rope_theta"]
    assert {name: default[name] for name in GEMMA3_TEXT} == GEMMA3_TEXT


def test_a_damaged_modelopt_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | {"quantization_config": None}))
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_target_shape(tmp_path / "config.json").bytes_per_weight == 1.0
    for damaged in ("{", "[]"):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"hf_quant_config\.json does not hold ModelOpt's quantization"):
            read_target_shape(tmp_path / "config.json")


def test_a_configuration_that_says_too_little(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"n_embd": 768}))
    with pytest.raises(ValueError, match=r"does not say 'hidden_size'.*plan\.target"):
        read_target_shape(file)
    file.write_text(json.dumps({"text_config": "gemma3"}))
    with pytest.raises(ValueError, match="text_config is a str, not an object"):
        read_target_shape(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_target_shape(file)


@pytest.mark.parametrize("tree", DRAFTS, ids=lambda tree: tree["method"])
def test_a_drafts_weights_are_counted(tree: dict[str, Any]) -> None:
    target = TargetShape(
        hidden_size=16, num_layers=4, vocab_size=64, parameters=1, active_parameters=1, attention_width=16
    )
    config = parse_draft_config(tree)
    chosen = torch.arange(config.vocabulary_size(64))
    draft = build_draft(config, torch.zeros(64, 16), DraftVocabulary(chosen, 64), [0, 1, 2])
    draft.start_from(torch.zeros(64, 16))
    shape = config.shape(target, 3, "float32")
    assert shape.parameters == sum(p.numel() for p in draft.parameters())
    frozen = sum(buffer.numel() for buffer in draft.buffers() if buffer.is_floating_point())
    assert shape.frozen + shape.frozen_embeddings == frozen
    assert shape.vocab_size == len(chosen)
