"""Quantized checkpoints, in the layouts of published repositories: what is read equals the float weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizers import (
    Tensors,
    awq,
    fp8_blocks,
    fp8_rows,
    fp8_tensor,
    gptq,
    linear_modules,
    nvfp4,
    pack_quantized,
    quantize,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.target import TargetConfig
from models.targets import quantization
from models.targets.dequantized import DequantizedWeights
from models.targets.prepare import prepare_target
from models.targets.quantization import read_quantization
from models.targets.weights import read_target_head

HIDDEN, VOCABULARY = 192, 300
"""Neither is a multiple of 128."""


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensors], dict[str, Any], float]] = {
    "fp8 128x128": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 0.07),
    "modelopt FP8": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}, 0.07),
    "compressed-tensors float-quantized": (
        fp8_rows,
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": []},
        0.07,
    ),
    "modelopt NVFP4": (lambda w: nvfp4(w, False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.35),
    "compressed-tensors nvfp4-pack-quantized": (
        lambda w: nvfp4(w, True),
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        0.35,
    ),
}
"""By the name that is recorded: quantizer, settings, and the greatest relative error of a value of middle size."""


def save_llama(folder: Path, hidden: int, vocabulary: int) -> None:
    """A small Llama with random weights, in bfloat16."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=256, tie_word_embeddings=False, **sizes
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


@pytest.fixture
def target(tmp_path: Path, tiny_target: TargetRecord) -> Path:
    """A small Llama with a tokenizer."""
    save_llama(tmp_path, HIDDEN, VOCABULARY)
    AutoTokenizer.from_pretrained(tiny_target.path).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_head_and_embedding_are_the_float_weights(target: Path, layout: str) -> None:
    quantizer, settings, tolerance = LAYOUTS[layout]
    before = quantize(target, ("lm_head", "model.embed_tokens"), quantizer, settings)
    assert read_quantization(target) == layout
    head = read_target_head(target, torch.float32)
    for module, read in (("lm_head", head.head), ("model.embed_tokens", head.embedding)):
        weight = before[module]
        middle = weight.abs() > weight.abs().mean()
        assert ((read - weight).abs() / weight.abs())[middle].max() < tolerance
        assert (read - weight).norm() / weight.norm() < tolerance / 2
    rounded = read_target_head(target, torch.bfloat16)
    assert torch.equal(rounded.head, head.head.bfloat16())
    record = prepare_target(TargetConfig(name=str(target), aux_layer_ids=(0,)))
    assert record.quantization == layout


def test_fp8_blocks_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """All linear layers are in blocks, as in Qwen's repositories; transformers dequantizes them on a CPU.

    Whole blocks only: transformers 5.23 divides 300 rows with 3 scales into blocks of 100.
    """
    target = tmp_path
    save_llama(target, 256, 384)
    linear = [
        name.removesuffix(".weight")
        for name, tensor in load_file(target / "model.safetensors").items()
        if tensor.ndim == 2 and "embed" not in name
    ]
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    quantize(target, tuple(linear), fp8_blocks, settings | {"modules_to_not_convert": ["model.embed_tokens"]})
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    head = read_target_head(target, torch.float32)
    weights = model.state_dict()
    assert torch.equal(head.embedding, weights["model.embed_tokens.weight"])
    torch.testing.assert_close(head.head, weights["lm_head.weight"].float(), rtol=4e-3, atol=0)


def test_a_plain_head_of_a_quantized_target_is_read_as_it_is(target: Path) -> None:
    before = load_file(target / "model.safetensors")["lm_head.weight"]
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["lm_head"]}
    quantize(target, ("model.layers.0.mlp.up_proj",), awq, settings)
    assert torch.equal(read_target_head(target, torch.bfloat16).head, before)
    assert prepare_target(TargetConfig(name=str(target), aux_layer_ids=(0,))).quantization == "awq 4-bit"


@pytest.mark.parametrize(
    ("quantizer", "settings", "told"),
    [
        (awq, {"quant_method": "awq", "bits": 4}, r"qweight I32, .*awq 4-bit"),
        (gptq, {"quant_method": "gptq", "bits": 4, "lm_head": True}, r"g_idx I32, .*gptq 4-bit.*lm_head: false"),
        (pack_quantized, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, "weight_packed I32"),
    ],
)
def test_packed_heads_are_refused_at_prepare(
    target: Path, quantizer: Callable[[Tensor], Tensors], settings: dict[str, Any], told: str
) -> None:
    quantize(target, ("lm_head",), quantizer, settings)
    with pytest.raises(Refusal, match=told):
        prepare_target(TargetConfig(name=str(target), aux_layer_ids=(0,)))


def test_blocks_of_another_size_than_the_config_says_are_refused(target: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    quantize(target, ("lm_head",), fp8_blocks, settings)
    with pytest.raises(Refusal, match="not blocks of 64 x 64"):
        read_target_head(target, torch.float32)


def test_what_a_checkpoint_says_of_its_quantization(target: Path) -> None:
    assert read_quantization(target) is None
    file = target / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}))
    assert read_quantization(target) == "modelopt NVFP4"
    config = json.loads((target / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 8}
    (target / "config.json").write_text(json.dumps(config | {"text_config": {"quantization_config": settings}}))
    assert read_quantization(target) == "gptq 8-bit"


def test_each_files_header_is_read_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model of experts has ten thousands of matrices."""
    quantize(target, linear_modules(target), fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    opened: list[Path] = []

    def noted(path: Path, framework: str) -> Any:
        opened.append(path)
        return safe_open(path, framework=framework)

    monkeypatch.setattr(quantization, "safe_open", noted)
    weights = DequantizedWeights(target, torch.float32)
    assert len(weights) > 15
    assert opened == [target / "model.safetensors"]
