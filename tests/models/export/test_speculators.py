"""Our exports in the package `speculators`: its own classes load them, and say the same of the same features."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from infra.records.drafts import WEIGHTS
from models.config.draft import parse_draft_config
from models.drafts.base import Draft
from models.drafts.blocks.layers import Blocks
from models.drafts.dflash.module import DFlashDraft
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import speculators_settings
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.targets.weights import read_target_head

HIDDEN, VOCABULARY, LENGTH, STEPS, LAYERS = 24, 60, 19, 3, 5
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 40, "rope_theta": 50_000.0}
EAGLE3 = SIZES | {"method": "eagle3", "vocab_size": 32}
DFLASH = SIZES | {"method": "dflash", "block_size": 4, "layer_types": ["full_attention"] * 2, "mask_token_id": 11}
WINDOW = {"sliding_window": 64}
"""Longer than the text: speculators counts it from the block's start, and engines, as we do, from each row."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "norms": {"fc_norm": True, "norm_output": True, "rms_norm_eps": 1e-3},
    "one norm": {"norm_before_fc": True, "num_kv_heads": 4},
    "whole vocabulary": {"vocab_size": None},
    "own embeddings": {"train_embeddings": True, "shared_head": True},
    "residual after the norm": {"norm_before_residual": True},
    "Qwen3 layers": {"qk_norm": True, "attention_bias": True, "norm_before_residual": True},
    "two layers": {"layer_types": ("full_attention",) * 2, "attention_bias": True},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "yarn rope": {"rope_scaling": LLAMA3 | {"rope_type": "yarn"}, "qk_norm": True},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head and embeddings of its own, and enough layers."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def export(target: Path, folder: Path, knobs: dict[str, Any], layers: tuple[int, ...] = (0, 2, 4)) -> Draft:
    """A draft with random weights, exported."""
    torch.manual_seed(2)
    config, head = parse_draft_config(knobs), read_target_head(target, torch.float32)
    ids = torch.randperm(VOCABULARY)[: config.vocabulary_size(VOCABULARY)].sort().values
    draft = build_draft(config, head.embedding, DraftVocabulary(ids, VOCABULARY), layers)
    draft.start_from(head.head)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    served = read_served_target(target)
    write_export(draft, folder, {}, served, speculators_settings(draft, served, str(target), lookahead=3))
    return draft.eval()


def load(folder: Path) -> Any:
    """By the package itself, which chooses the class by `config.json`; only the kind of attention is the test's.

    Its EAGLE-3 leaves embeddings that are not stored as they are, where its DFlash (and vLLM) takes the target's.
    """
    config: Any = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(folder, config=config).eval()
    model._load_verifier_weights(overwrite_embed_tokens="embed_tokens.weight" not in load_file(folder / WEIGHTS))
    return model


def logits_of(model: Any, **inputs: Any) -> list[Tensor]:
    """What its head says, call after call: its forward returns losses."""
    said: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, output: said.append(output[0]))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return said


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layers", [(0, 2, 4), (3,)])
def test_an_eagle3_draft_says_the_same(name, layers, target, tmp_path):
    draft = export(target, tmp_path / "export", EAGLE3 | VARIANTS[name], layers)
    assert isinstance(draft, Eagle3Draft)
    model = load(tmp_path / "export")
    tokens, aux = torch.randint(VOCABULARY, (LENGTH + 1,)), torch.randn(LENGTH, len(layers) * HIDDEN)
    theirs = logits_of(
        model,
        hidden_states=aux[None],
        input_ids=tokens[None, 1:],
        document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
        ttt_steps=STEPS,
    )
    following = torch.cat([tokens[1:], torch.zeros(STEPS, dtype=torch.long)])
    ours = draft.unroll(tokens[1:], aux, [LENGTH], STEPS, lambda step, _normed: following[step : step + LENGTH])
    for normed, said in zip(ours, theirs, strict=True):
        mine = draft.logits(normed)
        assert mine.std() > 0.5
        assert (mine - said).abs().max() < 1e-4
    if not draft.vocabulary.whole:
        assert torch.equal(torch.arange(len(model.d2t)) + model.d2t, draft.vocabulary.target_ids)
        assert torch.equal(model.t2d, draft.vocabulary.t2d)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        WINDOW | {"layer_types": ["sliding_attention"] * 2},
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "sliding_sees_ahead": True},
        {"attention_bias": True, "rope_scaling": LLAMA3, "rope_theta": 500.0},
    ],
    ids=str,
)
def test_a_dflash_draft_says_the_same(changes, target, tmp_path):
    draft = export(target, tmp_path / "export", DFLASH | changes)
    assert isinstance(draft, DFlashDraft)
    model = load(tmp_path / "export")
    size, tokens, aux = 4, torch.randint(VOCABULARY, (LENGTH,)), torch.randn(LENGTH, 3 * HIDDEN)
    # Of one position: that is where the block starts.
    loss_mask = torch.zeros(1, LENGTH)
    loss_mask[0, 9] = 1
    (theirs,) = logits_of(
        model,
        hidden_states=aux[None],
        input_ids=tokens[None],
        loss_mask=loss_mask,
        verifier_last_hidden_states=torch.randn(1, LENGTH, HIDDEN),
        document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=1,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    blocks = Blocks(tokens[9:10], torch.tensor([9]), torch.tensor([0]))
    ours = draft.logits(draft.fill(blocks, draft.feature_keys(aux, torch.arange(LENGTH))))[0]
    assert len(theirs) == size
    assert ours.std() > 0.5
    assert (ours - theirs[1:]).abs().max() < 1e-4


def test_one_configuration_is_sglangs_and_vllms(target, tmp_path):
    """Settings that both have mean the same, and layers are counted as each does."""
    draft = export(target, tmp_path, EAGLE3)
    settings = json.loads((tmp_path / "config.json").read_text())
    theirs, engine = draft.speculators_config(), draft.engine_config()
    assert theirs is not None
    assert engine is not None
    assert settings["transformer_layer_config"]["num_aux_hidden_states"] == engine["num_aux_hidden_states"] == 3
    for name in (theirs.keys() & engine.keys()) - {"architectures"}:
        assert theirs[name] == engine[name], name
    assert engine.items() <= settings.items()
    assert settings["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert settings["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert settings["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_a_draft_that_they_do_not_have_is_exported_without_their_part(target, tmp_path):
    head = {"shared_head": True, "vocab_size": None}
    mixed = {"layer_types": ["sliding_attention", "full_attention"]} | WINDOW
    kinds = {"head": EAGLE3 | head, "norm": DFLASH | {"fc_norm": True}, "mixed": DFLASH | mixed}
    for place, knobs in kinds.items():
        draft = export(target, tmp_path / place, knobs)
        assert draft.speculators_config() is None
        assert "speculators_config" not in json.loads((tmp_path / place / "config.json").read_text())
