"""A target whose weights stay in their files computes what one in memory does, bit for bit."""

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from infra.refusal import Refusal
from models.capture.ranking import check_ranking
from models.targets.architecture import has_experts, read_model_config
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout
from models.targets.model import TargetModel
from models.targets.weights import read_target_head

HIDDEN, LAYERS = 32, (0, 1, 3)
SIZES = {"vocab_size": 97, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TOKENS = torch.randint(3, 97, (24,), generator=torch.Generator().manual_seed(5))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def gemma() -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=6, tie_word_embeddings=True))


def experts() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))


def gemma4() -> PreTrainedModel:
    """As E2B and E4B are published, inside a multimodal model, with an embedding of every token for each layer."""
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    text = SIZES | more | {"sliding_window": 6, "layer_types": kinds, "global_head_dim": 16}
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 14, "position_embedding_size": 16}
    ids = {f"{kind}_token_id": place for place, kind in enumerate(("image", "video", "audio"))}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=sight, **ids))


@pytest.fixture(params=[llama, gemma, gemma4, experts])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = request.param()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def streamed(folder: Path, dtype: torch.dtype) -> TargetModel:
    return TargetModel.streamed(folder, LAYERS, dtype, read_target_head(folder, dtype), folder.parent / "converted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_the_same(folder: Path, dtype: torch.dtype) -> None:
    ours, theirs = streamed(folder, dtype), TargetModel.load(folder, LAYERS, dtype)
    held = [name for name, weight in ours.model.named_parameters() if weight.device.type != "meta"]
    with_rows = getattr(ours.model.config.get_text_config(), "hidden_size_per_layer_input", None)
    assert held == (["model.language_model.embed_tokens.weight"] if with_rows else []), "nothing else is in memory"
    found, expected = ours.forward(TOKENS[None]), theirs.forward(TOKENS[None])
    assert found.aux.dtype == dtype
    assert torch.equal(found.aux, expected.aux)
    assert torch.equal(ours.logits(found.last[0]), theirs.logits(expected.last[0]))
    written = [file for file in (folder.parent / "converted").rglob("*") if file.is_file()]
    assert bool(written) == has_experts(read_model_config(folder)), "only experts are written again"


def test_layers_in_another_order_are_refused(folder: Path) -> None:
    hidden = TargetModel.load(folder, LAYERS, torch.float32).forward(TOKENS[None])
    layout, target = HiddenStateLayout(3, HIDDEN, torch.float32), streamed(folder, torch.float32)
    check_ranking(target, HiddenStates(hidden.aux[0], hidden.last[0]), TOKENS, layout)
    first, second, third = hidden.aux[0].chunk(3, dim=-1)
    with pytest.raises(Refusal, match=r"captured as layer 0 .* most are nearest to layer 1"):
        check_ranking(target, HiddenStates(torch.cat([second, first, third], -1), hidden.last[0]), TOKENS, layout)
