"""Embedding and head read from files equal those of the loaded model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from infra.records.data_path import TargetRecord
from models.targets.model import TargetModel
from models.targets.weights import TargetHead, read_target_head, weight_bytes

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}

FAMILIES = {
    "llama-untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, final_logit_softcapping=5.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "hyperclovax": lambda: HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**SIZES, logits_scaling=0.125)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_size", ["1GB", "4KB"])
def test_head_gives_the_models_logits(family: str, shard_size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "4KB")

    head = read_target_head(tmp_path, torch.float32)
    assert torch.equal(head.embedding, model.get_input_embeddings().weight)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        last = model(input_ids=tokens, output_hidden_states=True)
    logits = (last.hidden_states[-1] @ head.head.T) * head.logit_scale
    if head.soft_cap is not None:
        logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
    torch.testing.assert_close(logits, last.logits, rtol=1e-5, atol=1e-6)

    target = TargetModel(model, [0, 1])
    torch.testing.assert_close(target.logits(last.hidden_states[-1][0]), last.logits[0], rtol=1e-5, atol=1e-6)


def test_head_of_the_trained_tiny_target(tiny_target: TargetRecord) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target.path, dtype=torch.bfloat16)
    head = read_target_head(Path(tiny_target.path), torch.bfloat16)
    assert head.embedding.shape == (tiny_target.vocab_size, tiny_target.hidden_size)
    assert head.embedding.dtype == torch.bfloat16
    assert torch.equal(head.embedding, model.get_input_embeddings().weight)
    assert torch.equal(head.head, model.get_output_embeddings().weight)
    assert not torch.equal(head.head, head.embedding)


def test_text_model_is_found_beside_a_vision_tower(tmp_path: Path) -> None:
    model = FAMILIES["llama-untied"]()
    model.save_pretrained(tmp_path)
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    tensors["vision_tower.embed_tokens.weight"] = torch.zeros(3, 3)
    tensors["language_model.model.mtp.embed_tokens.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = read_target_head(tmp_path, torch.float32)
    assert torch.equal(head.embedding, model.get_input_embeddings().weight)
    assert torch.equal(head.head, model.get_output_embeddings().weight)


@pytest.mark.parametrize("place", ["whole", "text", "nowhere"])
def test_weights_are_counted_in_the_data_type_of_the_whole_configuration(place: str, tmp_path: Path) -> None:
    """google/gemma-3-27b-it gives its data type once, for all parts."""
    text = {"model_type": "gemma3_text", "hidden_size": 16}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    if place != "nowhere":
        {"whole": config, "text": text}[place]["torch_dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"embed_tokens.weight": torch.zeros(64, 16, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    nbytes = (tmp_path / "model.safetensors").stat().st_size
    stored = 4 if place == "nowhere" else 2
    assert weight_bytes(tmp_path, torch.bfloat16) == nbytes * 2 // stored
    assert weight_bytes(tmp_path, torch.float32) == nbytes * 4 // stored


def test_rows_of_bfloat16_logits_lie_together() -> None:
    """Otherwise whatever reads them, top-k and softmax above all, takes several times as long."""
    torch.manual_seed(0)
    head, last = torch.randn(300, 16), torch.randn(5, 16)
    exact = TargetHead(head, head, 2.0, 30.0).logits(last)
    assert torch.allclose(exact, 30 * torch.tanh(2 * last @ head.T / 30), atol=1e-5)
    rounded = TargetHead(head.bfloat16(), head.bfloat16(), 2.0, 30.0).logits(last.bfloat16())
    assert rounded.dtype == torch.float32
    assert rounded.is_contiguous()
    assert torch.allclose(rounded, exact, atol=0.3)


def test_refusals(tmp_path: Path) -> None:
    model = FAMILIES["llama-untied"]()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    lm_head = tensors.pop("lm_head.weight")
    save_file(tensors, path)
    with pytest.raises(ValueError, match="does not tie"):
        read_target_head(tmp_path, torch.float32)
    save_file({"lm_head.weight": lm_head}, path)
    with pytest.raises(ValueError, match="embed_tokens"):
        read_target_head(tmp_path, torch.float32)
    path.unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        read_target_head(tmp_path, torch.float32)
