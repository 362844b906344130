"""MLA drafts against the attention of transformers' DeepSeek-V3, with the same weights."""

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from models.config.eagle3 import Eagle3Config
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary

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
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
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
        max_position_embeddings=64, attn_implementation="eager", **config.mla.model_dump(),
        rope_parameters={"rope_theta": config.rope_theta}
        | ({"rope_type": "default"} if scaling is None else scaling.parameters()),
    )  # fmt: skip
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
