"""MLA drafts against the attention of transformers' DeepSeek-V3, with the same weights."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from models.config.eagle3 import Eagle3Config
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import vllm_method
from models.export.served_target import ServedTarget
from models.export.sglang import write_export

HIDDEN, VOCABULARY, AUX, LENGTH = 24, 60, (0, 2, 3), 40
SIZES = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SHAPES = {
    "latent queries": {"mla": SIZES},
    "direct queries": {"mla": SIZES | {"q_lora_rank": None}},
    "values as wide as keys": {"mla": SIZES | {"v_head_dim": 16}},
    "YaRN": {"mla": SIZES, "rope_scaling": YARN, "rope_theta": 50_000.0},
    "YaRN with mscale": {"mla": SIZES, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "Kimi's YaRN, direct": {
        "mla": SIZES | {"q_lora_rank": None},
        "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 50_000.0,
    },
}


def make_draft(changes: dict) -> Eagle3Draft:
    torch.manual_seed(5)
    config = Eagle3Config.model_validate({"num_heads": 4, "intermediate_size": 40, "vocab_size": None} | changes)
    vocabulary = DraftVocabulary(torch.arange(config.vocabulary_size(VOCABULARY)), VOCABULARY)
    draft = Eagle3Draft(config, torch.randn(VOCABULARY, HIDDEN), vocabulary, AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return draft.double().eval()


def attention_of_transformers(draft: Eagle3Draft, x: Tensor) -> Tensor:
    """`[N, H]` from what the layer's attention reads, `[N, 2H]`."""
    config, scaling = draft.config, draft.config.rope_scaling
    assert config.mla is not None
    theirs = DeepseekV3Config(
        hidden_size=2 * HIDDEN, num_attention_heads=config.num_heads, num_key_value_heads=config.num_heads,
        max_position_embeddings=64, **config.mla.model_dump(),
        rope_parameters={"rope_theta": config.rope_theta}
        | ({"rope_type": "default"} if scaling is None else scaling.parameters()),
    )  # fmt: skip
    theirs._attn_implementation = "eager"
    attention, positions = DeepseekV3Attention(theirs, 0).double(), torch.arange(len(x)).unsqueeze(0)
    attention.o_proj = torch.nn.Linear(config.num_heads * config.mla.v_head_dim, HIDDEN, bias=False).double()
    attention.load_state_dict(draft.decoder_layers[0].self_attn.state_dict())
    tables = DeepseekV3RotaryEmbedding(theirs)(x, positions)
    mask = torch.full((1, 1, len(x), len(x)), float("-inf"), dtype=x.dtype).triu(1)
    return attention(x.unsqueeze(0), tables, mask)[0].squeeze(0)


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_logits_are_those_with_the_attention_of_transformers(name: str) -> None:
    draft = make_draft(SHAPES[name])
    tokens, aux = torch.randint(VOCABULARY, (LENGTH,)), torch.randn(LENGTH, len(AUX) * HIDDEN, dtype=torch.float64)
    (normed,) = draft.unroll(tokens, aux, (LENGTH,), 1, lambda _step, _normed: tokens)
    layer, fused = draft.decoder_layers[0], draft.fuse(aux)
    x = torch.cat([layer.input_layernorm(draft.embed_tokens.weight[tokens]), layer.hidden_norm(fused)], dim=-1)
    hidden = fused + attention_of_transformers(draft, x)
    inner = layer.post_attention_layernorm(hidden)
    mlp = layer.mlp
    hidden = hidden + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
    expected = draft.logits(draft.norm(hidden))
    assert expected.std() > 0.5
    assert (draft.logits(normed) - expected).abs().max() < 1e-6 * expected.std()


LAYER = {
    "self_attn.fused_qkv_a_proj": (12 + 16 + 6, 2 * HIDDEN), "self_attn.q_a_layernorm": (12,),
    "self_attn.q_b_proj": (4 * 16, 12), "self_attn.kv_a_layernorm": (16,), "self_attn.kv_b_proj": (4 * (10 + 8), 16),
    "self_attn.o_proj": (HIDDEN, 4 * 8), "mlp.gate_up_proj": (2 * 40, HIDDEN), "mlp.down_proj": (HIDDEN, 40),
    "input_layernorm": (HIDDEN,), "hidden_norm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
}  # fmt: skip
VLLM = {f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()} | {
    "model.fc.weight": (HIDDEN, 3 * HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (32, HIDDEN),
    "draft_id_to_target_id": (32,), **{f"model.fc_norm.{index}.weight": (HIDDEN,) for index in range(3)},
}  # fmt: skip
"""Parameters of vLLM's `Eagle3DeepseekV2ForCausalLM` (0.32.0), without the embeddings, which are the target's."""


def export(folder: Path, **changes: object) -> tuple[dict, dict[str, Tensor]]:
    draft = make_draft({"mla": SIZES, "vocab_size": 32, "fc_norm": True, **changes})
    write_export(draft, folder, {}, ServedTarget(torch.bfloat16, context_length=64, num_layers=4))
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def name_in_vllm(name: str) -> str:
    """Matrices that it stacks have one name there."""
    for parts, whole in (("(gate|up)_proj", "gate_up_proj"), ("(q_a_proj|kv_a_proj_with_mqa)", "fused_qkv_a_proj")):
        name = re.sub(rf"\.{parts}\.", f".{whole}.", name)
    if name == "d2t":
        return "draft_id_to_target_id"
    return name if name.startswith("lm_head.") else f"model.{name}"


def test_vllm_finds_its_weights_and_settings(tmp_path: Path) -> None:
    settings, tensors = export(tmp_path / "export", rope_scaling=YARN, rope_theta=50_000.0)
    loaded: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if name != "t2d":
            rows, *others = tensor.shape
            theirs = name_in_vllm(name)
            loaded[theirs] = (loaded.get(theirs, (0,))[0] + rows, *others)
    assert loaded == VLLM
    assert settings["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    # Of the type deepseek_v3 it makes the target's MTP layer.
    assert settings["model_type"] == "kimi_k2"
    assert settings["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    assert settings["draft_vocab_size"] == 32
    # Both engines read the type kimi_k2 with this class; vLLM the RoPE of MLA layers, whatever its scaling, as YaRN.
    config = DeepseekV3Config.from_dict(settings)
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    assert (config.qk_head_dim, config.head_dim) == (16, 6)
    assert config.rope_parameters is not None
    assert config.rope_parameters.items() >= (YARN | {"rope_theta": 50_000.0}).items()


def test_the_export_names_vllm_only_where_its_class_reads_the_same(tmp_path: Path) -> None:
    assert vllm_method(export(tmp_path / "yarn", rope_scaling=YARN)[0]) == "eagle3"
    assert vllm_method(export(tmp_path / "plain")[0]) == "eagle3"
    assert vllm_method(export(tmp_path / "head", vocab_size=None, shared_head=True)[0]) is None
    assert make_draft({"mla": SIZES | {"q_lora_rank": None}}).engine_config() is None
