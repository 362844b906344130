"""Qwen3.5's layout of an MTP layer: computed as by transformers' own layer, and written back."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from infra.refusal import Refusal
from models.config.recipe import as_recipe
from models.drafts.mtp.module import MtpDraft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.stitched import stitch
from models.targets.own_layer import own_files, read_own
from models.targets.weights import read_target_head

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from target_families import FAMILIES, HIDDEN, VOCABULARY, write


def own_tensors(config: Qwen3_5TextConfig) -> dict[str, Tensor]:
    """A layer with random weights by the names of Qwen3.5's checkpoints."""
    config = Qwen3_5TextConfig.from_dict(config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    generator, size = torch.Generator().manual_seed(3), config.hidden_size
    shapes = {f"mtp.layers.0.{name}": t.shape for name, t in Qwen3_5DecoderLayer(config, 0).state_dict().items()}
    shapes |= {f"mtp.{name}.weight": (size,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= {"mtp.fc.weight": (size, 2 * size)}
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


@pytest.fixture
def qwen(tiny_target, tmp_path) -> Path:
    folder = write(FAMILIES["qwen3_5"], tmp_path / "qwen", Path(tiny_target.path))
    own = own_tensors(Qwen3_5TextConfig.from_dict(json.loads((folder / "config.json").read_text())["text_config"]))
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor.bfloat16() for name, tensor in own.items()}, file, {"format": "pt"})
    return folder


def draft_for(folder: Path) -> MtpDraft:
    """As a recipe of three lines starts it."""
    tree = {"name": "qwen", "target": {"name": str(folder)}, "draft": {"method": "mtp"}, "data": {"source": "a.jsonl"}}
    config, head = as_recipe(tree, "here"), read_target_head(folder, torch.float32)
    assert config.target.aux_layer_ids == ()
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    draft = build_draft(config.draft, head.embedding, every, ())
    draft.start_from(head.head)
    own = read_own(folder, draft.target_shapes)
    draft.load_state_dict({name: own[stored] for name, stored in draft.target_names.items()})
    assert isinstance(draft, MtpDraft)
    return draft


@torch.no_grad()
def test_the_layer_is_transformers_own(qwen):
    draft, count = draft_for(qwen), 9
    config = Qwen3_5TextConfig.from_dict(json.loads((qwen / "config.json").read_text())["text_config"])
    own = {name: tensor.float() for name, tensor in load_file(qwen / "model.safetensors").items() if "mtp." in name}
    one = config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    layer = Qwen3_5DecoderLayer(Qwen3_5TextConfig.from_dict(one | {"attn_implementation": "eager"}), 0)
    layer.load_state_dict({name.removeprefix("mtp.layers.0."): t for name, t in own.items() if ".layers." in name})

    def norm(name: str, x: Tensor) -> Tensor:
        module = Qwen3_5RMSNorm(HIDDEN, config.rms_norm_eps)
        module.weight.copy_(own[f"mtp.{name}.weight"])
        return module(x)

    tokens, last = torch.randint(VOCABULARY, (count + 1,)), torch.randn(count, HIDDEN)
    embedded = draft.embed_tokens.weight[tokens[1:]]
    both = torch.cat([norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", last)], dim=-1)
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    tables = Qwen3_5TextRotaryEmbedding(config)(both[None], torch.arange(count).expand(3, 1, count))
    out = layer((both @ own["mtp.fc.weight"].T)[None], position_embeddings=tables, attention_mask=mask)
    expected = norm("norm", (out[0] if isinstance(out, tuple) else out).view(count, HIDDEN))
    (found,) = draft.unroll(tokens[1:], last, [count], 1, lambda *_: tokens)
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, atol=1e-5)


@torch.no_grad()
def test_a_stitched_target_differs_in_the_layer_alone(qwen, tmp_path):
    draft, stitched = draft_for(qwen), tmp_path / "stitched"
    for parameter in draft.parameters():
        parameter.add_(0.25)
    assert stitch(draft, qwen, stitched) == ["model.safetensors"]
    before, after = (load_file(folder / "model.safetensors") for folder in (qwen, stitched))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)) == (not name.startswith("mtp.")), (
            name
        )
    again = draft_for(stitched)
    for (name, one), other in zip(draft.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other), name
    with pytest.raises(Refusal, match="is there already"):
        stitch(draft, qwen, stitched)


def test_layers_that_are_absent_or_of_another_kind_are_refused(qwen, tmp_path):
    shapes, tensors = draft_for(qwen).target_shapes, load_file(qwen / "model.safetensors")
    cases = {
        "holds no MTP layer": {name: tensor for name, tensor in tensors.items() if "mtp." not in name},
        "lacks mtp.norm.weight": {name: tensor for name, tensor in tensors.items() if name != "mtp.norm.weight"},
        "also has mtp.layers.0.mlp.experts": tensors | {"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2)},
        "is quantized": tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)},
        "layer with the draft's sizes has": tensors | {"mtp.norm.weight": torch.zeros(3)},
    }
    for number, (why, given) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        save_file(given, tmp_path / str(number) / "model.safetensors")
        with pytest.raises(Refusal, match=why):
            own_files(tmp_path / str(number), shapes)
