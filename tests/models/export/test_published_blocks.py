"""Published DSpark, Domino and DFlash 2 drafts as a start: each way to write their settings, and the right layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import LlamaConfig, LlamaForCausalLM

from infra.records.data_path import TargetRecord
from infra.records.drafts import BLOCK, CONFIG
from infra.refusal import Refusal
from models.config.draft import parse_draft_config
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.published import load_published
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.targets.weights import read_target_head

HIDDEN, VOCABULARY, LAYERS, AUX, STEPS = 16, 48, 6, (0, 2, 4), 4
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24, "layer_types": ["full_attention"]}
RECIPE = parse_draft_config({"method": "dspark", "anchors": 9, "tv_weight": 0.5} | SHAPE)
TOP = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "markov_rank", "markov_head_type",
       "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
"""Settings that may stand at the top, in `dflash_config` or in `dspark_config`."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetRecord:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, **sizes))
    with torch.no_grad():
        model.lm_head.weight.copy_(5 * normalize(torch.randn(VOCABULARY, HIDDEN)))
    model.save_pretrained(folder)
    return TargetRecord(
        name="target", path=str(folder), revision="r", model_type="llama", hidden_size=HIDDEN, num_layers=LAYERS,
        vocab_size=VOCABULARY, licence="none",
    )  # fmt: skip


def published(target: TargetRecord, folder: Path, **changes) -> tuple[Draft, dict]:
    """A draft in `folder`, as if it were not ours, and its settings."""
    head = read_target_head(Path(target.path), torch.float32)
    settings = {"method": "dspark", "block_size": STEPS, "markov_rank": 6} | SHAPE | changes
    config = parse_draft_config({name: value for name, value in settings.items() if value is not None})
    draft = build_draft(config, head.embedding, DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY), AUX)
    draft.start_from(head.head)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    write_export(draft, folder, {}, read_served_target(Path(target.path)))
    settings = json.loads((folder / CONFIG).read_text())
    del settings[BLOCK]
    return draft, settings


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("form", ["both", "top", "dflash_config", "dspark_config", "no flag", "SpecForge"])
def test_it_proposes_what_it_did(target, tmp_path, kind, form):
    draft, settings = published(target, tmp_path, markov_head=kind, confidence_reads_token=kind != "gated")
    nested = settings.pop("dflash_config") | {"block_size": settings["block_size"]}
    if form == "both":
        settings["dflash_config"] = nested
    elif form in ("dflash_config", "dspark_config"):
        settings = {name: value for name, value in settings.items() if name not in (*TOP, "block_size")}
        settings[form] = nested
    elif form in ("no flag", "SpecForge"):
        del settings["sample_from_anchor"]
    if form == "SpecForge":
        # configs/qwen3-8b-dspark.json; its early checkpoints had the heads inside another module.
        settings = {name: value for name, value in settings.items() if name not in TOP}
        del nested["sample_from_anchor"]
        more = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
        settings |= {"architectures": ["DSparkDraftModel"], "dflash_config": nested | more}
        file = tmp_path / "model.safetensors"
        inside = {f"logit_head.{name}": value for name, value in load_file(file).items() if "_head." in name}
        save_file({name: value for name, value in load_file(file).items() if "_head." not in name} | inside, file)
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    again = load_published(tmp_path, RECIPE, target)
    assert (again.config.anchors, again.config.tv_weight) == (9, 0.5), "how it is trained is the recipe's"
    tokens, aux = torch.randint(VOCABULARY, (21,)), torch.randn(20, len(AUX) * HIDDEN)
    expected = draft.rollout(tokens, aux, STEPS)
    assert len(expected.unique()) > 8
    assert torch.equal(again.rollout(tokens, aux, STEPS), expected)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_dflash2_draft_starts_as_it_was(target, tmp_path):
    own = {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 7, "block_size": STEPS + 1}
    draft, settings = published(target, tmp_path, method="dflash2", markov_rank=None, **own)
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    again = load_published(tmp_path, parse_draft_config({"method": "dflash2"} | SHAPE), target)
    tokens, aux = torch.randint(VOCABULARY, (21,)), torch.randn(20, len(AUX) * HIDDEN)
    assert torch.equal(again.rollout(tokens, aux, STEPS), draft.rollout(tokens, aux, STEPS))
    del settings["dflash_config"]["selector_rank"]
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    with pytest.raises(Refusal, match=r"damaged or incomplete \(KeyError: 'selector_rank'\)"):
        load_published(tmp_path, parse_draft_config({"method": "dflash2"} | SHAPE), target)


@pytest.mark.parametrize("form", ["both", "top", "SpecForge's name"])
@pytest.mark.parametrize("first", [True, False])
def test_a_domino_draft_starts_as_it_was(target, tmp_path, form, first):
    own = {"gru_hidden_dim": 5, "emb_dim": 6, "block_size": STEPS + 1, "sample_from_anchor": first}
    draft, settings = published(target, tmp_path, method="domino", markov_rank=None, **own)
    if form == "top":
        settings |= settings.pop("dflash_config")
    elif form == "SpecForge's name":
        settings["architectures"] = ["DominoDraftModel"]
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    recipe = parse_draft_config({"method": "domino", "decay_ratio": 0.0} | SHAPE)
    again = load_published(tmp_path, recipe, target)
    assert (again.config.sample_from_anchor, again.config.decay_ratio) == (first, 0.0)
    tokens, aux = torch.randint(VOCABULARY, (21,)), torch.randn(20, len(AUX) * HIDDEN)
    expected = draft.rollout(tokens, aux, STEPS)
    assert len(expected.unique()) > 8
    assert torch.equal(again.rollout(tokens, aux, STEPS), expected)
    for wrong in ({"shift_label": None}, {"sample_from_anchor": not first}, {"pure_draft_prefix_len": 2}):
        (name,) = wrong
        (tmp_path / CONFIG).write_text(
            json.dumps(settings | {"dflash_config": settings.get("dflash_config", {}) | wrong})
        )
        if form != "top" or name != "shift_label":
            with pytest.raises(Refusal, match=name):
                load_published(tmp_path, recipe, target)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sample_from_anchor": False}, "its sample_from_anchor is False, and DSpark drafts here have the anchor"),
        ({"markov_rank": None}, "its markov_rank is missing"),
        ({"dflash_config": {"markov_rank": 5}}, "its markov_rank is 5 in dflash_config and 6 beside it"),
        ({"markov_head_type": "lstm"}, "drafts here cannot be of its shape: dspark.markov_head is 'lstm'"),
    ],
)
def test_what_it_cannot_be_is_refused(target, tmp_path, changes, reason):
    _, settings = published(target, tmp_path)
    settings = settings | {"dflash_config": {}} | changes
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    with pytest.raises(Refusal, match=reason):
        load_published(tmp_path, RECIPE, target)
