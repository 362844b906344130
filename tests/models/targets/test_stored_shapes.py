"""Weights that do not fit the target's architecture are refused at preparation, and once more where they are loaded."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizers import fp8_blocks, linear_modules, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.target import TargetConfig
from models.targets.dequantized import load_dequantized
from models.targets.model import TargetModel
from models.targets.prepare import prepare_target
from models.targets.weights import read_target_head
from tests.models.seeing_targets import seeing_target

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from target_families import FAMILIES, write


@pytest.fixture
def copy(tiny_target: TargetRecord, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target.path, tmp_path / "copy"))


def prepare(folder: Path) -> TargetRecord:
    return prepare_target(TargetConfig(name=str(folder), aux_layer_ids=(0, 1)))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


UNFIT = {
    "compiled": (prefixed("_orig_mod."), r"39 of .*under other names \(_orig_mod\.lm_head\.weight\).*_orig_mod"),
    "adapters": (prefixed("base_model.model."), r"39 of .*\(base_model\.model\.lm_head\.weight\).*merge_and_unload"),
    "layer": (without("layers.2."), r"9 of the architecture's weights, model\.layers\.2\..*fetch its files again"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_weights_that_would_be_drawn_at_random_are_refused(copy: Path, kind: str) -> None:
    change, told = UNFIT[kind]
    rewrite(copy, change)
    with pytest.raises(Refusal, match=told):
        prepare(copy)
    with pytest.raises(Refusal, match=told):
        TargetModel.load(copy, [0], torch.float32)
    head = read_target_head(copy, torch.float32)
    with pytest.raises(Refusal, match=told):
        TargetModel.streamed(copy, [0], torch.float32, head, copy.parent / "converted")


def test_a_quantized_target_with_a_missing_layer_is_refused(copy: Path) -> None:
    quantize(copy, linear_modules(copy), fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert prepare(copy).quantization == "fp8 128x128"
    rewrite(copy, without("layers.2."))
    with pytest.raises(Refusal, match=r"2 of the architecture's weights, model\.layers\.2\.input_layernorm"):
        prepare(copy)
    with pytest.raises(Refusal, match=r"9 of the architecture's weights"):
        load_dequantized(copy, torch.float32)


def test_what_a_checkpoint_holds_beside_the_model_is_left_alone(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors | {"model.mtp.0.eh_proj.weight": torch.zeros(3, 5)})
    prepare(copy)
    TargetModel.load(copy, [0], torch.float32)


def test_a_vision_model_is_missed_by_what_reads_images_alone(tmp_path: Path, tiny_target: TargetRecord) -> None:
    folder = Path(seeing_target("gemma3", tmp_path / "target", tiny_target.path).path)
    rewrite(folder, without("vision_tower"))
    prepare(folder)
    TargetModel.load(folder, [0], torch.float32)
    with pytest.raises(Refusal, match=r"architecture's weights, model\.vision_tower"):
        TargetModel.load(folder, [0], torch.float32, sees=True)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_vocabulary_that_was_resized_without_its_config_is_refused(copy: Path, quantized: bool) -> None:
    if quantized:
        quantize(copy, ("lm_head",), fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    with pytest.raises(
        Refusal, match=r"lm_head\.weight is \[1024, 192\].*\[1000, 192\]: correct vocab_size in its conf"
    ):
        prepare(copy)


@pytest.fixture
def tied(tmp_path: Path, tiny_target: TargetRecord) -> Path:
    sizes: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_target.path).save_pretrained(tmp_path)
    return tmp_path


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tied: Path) -> None:
    """SGLang would serve the embedding, transformers the stored head."""

    def with_head(factor: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        return lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * factor}

    rewrite(tied, with_head(1.0))
    prepare(tied)
    rewrite(tied, with_head(1.1))
    with pytest.raises(Refusal, match=r"lm_head differs from model\.embed_tokens.*tie_word_embeddings: false"):
        prepare(tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    prepare(tied)


def test_a_head_of_its_own_is_taken_where_the_multimodal_configuration_ties_by_default(
    tiny_target: TargetRecord, tmp_path: Path
) -> None:
    """As Mistral 3 is published: without the setting, which its text model does not have either."""
    folder = write(FAMILIES["mistral3"], tmp_path, Path(tiny_target.path))
    settings = json.loads((folder / "config.json").read_text())
    assert settings.pop("tie_word_embeddings") is False
    (folder / "config.json").write_text(json.dumps(settings))
    prepare(folder)
    model = TargetModel.load(folder, (0, 1), torch.float32)
    (stored,) = (
        tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.endswith("lm_head.weight")
    )
    assert torch.equal(model.head_weight, stored)
