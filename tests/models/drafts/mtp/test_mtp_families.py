"""MTP layers of other families than MiMo: computed as by transformers' own layers, and written back."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from quantizers import fp8_blocks, nvfp4
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.refusal import Refusal
from models.config.recipe import as_recipe
from models.drafts.batched_proposer import ImageRows
from models.drafts.mtp.experts import BIAS
from models.drafts.mtp.module import MtpDraft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import load_draft, write_export
from models.export.stitched import stitch
from models.targets.own_layer import OwnLayer
from models.targets.weights import read_target_head, tensor_files

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from mtp_families import LAYOUTS, WEIGHTS, random_layer, write_with_layer
from target_families import HIDDEN, VOCABULARY


@pytest.fixture(scope="module", params=list(LAYOUTS))
def target(request, tiny_target, tmp_path_factory) -> Path:
    return write_with_layer(request.param, tmp_path_factory.mktemp("mtp") / request.param, Path(tiny_target.path))


def draft_for(folder: Path) -> MtpDraft:
    """As a recipe of three lines starts it."""
    tree = {"name": "x", "target": {"name": str(folder)}, "draft": {"method": "mtp"}, "data": {"source": "a.jsonl"}}
    config, head = as_recipe(tree, "here"), read_target_head(folder, torch.float32)
    assert config.target.aux_layer_ids == ()
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    draft = build_draft(config.draft, head.embedding, every, ())
    draft.start_from(head.head)
    own = draft.target_tensors(tensor_files(folder))
    OwnLayer.find(folder, own).load(own)
    assert isinstance(draft, MtpDraft)
    return draft


@torch.no_grad()
def test_the_layer_is_transformers_own(target):
    draft, count, layout = draft_for(target), 9, LAYOUTS[target.name]
    layer, own = random_layer(layout, target)
    config = layout.text(target)

    def norm(name: str, x: Tensor) -> Tensor:
        module = layout.kind("RMSNorm")(HIDDEN, config.rms_norm_eps)
        module.weight.copy_(own[f"{layout.prefix}{name}.weight"])
        return module(x)

    project, of_embedding, of_hidden, last_norm = layout.others
    tokens, last = torch.randint(VOCABULARY, (count + 1,)), torch.randn(count, HIDDEN)
    embedded = draft.embed_tokens.weight[tokens[1:]]
    both = torch.cat([norm(of_embedding, embedded), norm(of_hidden, last)], dim=-1)
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    three, start = layout.start.startswith("Qwen3_5"), "TextRotaryEmbedding"
    # Three axes: as of a text with an image in the middle.
    places = torch.randint(count, (3, 1, count)) if three else torch.arange(count)[None]
    tables = layout.kind(start if three else "RotaryEmbedding")(config)(both[None], places)
    entered = (both @ own[f"{layout.prefix}{project}.weight"].T)[None]
    out = layer(entered, position_embeddings=tables, attention_mask=mask, position_ids=places)
    expected = norm(last_norm, (out[0] if isinstance(out, tuple) else out).view(count, HIDDEN))
    images = ImageRows(torch.zeros(1, HIDDEN), places[:, 0].T.int()) if three else None
    (found,) = draft.unroll(tokens[1:], last, [count], 1, lambda *_: tokens, images=images)
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, atol=2e-5)


@torch.no_grad()
def test_a_stitched_target_differs_in_the_layer_alone(target, tmp_path):
    draft, stitched = draft_for(target), tmp_path / target.name
    for parameter in draft.parameters():
        parameter.add_(0.25)
    assert stitch(draft, target, stitched) == [WEIGHTS]
    before, after = (load_file(folder / WEIGHTS) for folder in (target, stitched))
    assert before.keys() == after.keys()
    prefix = LAYOUTS[target.name].prefix
    for name, tensor in before.items():
        trained = name.startswith(prefix) and not name.endswith(BIAS)
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)) == (not trained), name
    again = draft_for(stitched)
    for (name, one), other in zip(draft.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other), name
    with pytest.raises(Refusal, match="is there already"):
        stitch(draft, target, stitched)


def test_an_export_is_read_back_with_the_routers_bias_unrounded(target, tmp_path):
    draft = draft_for(target)
    served = read_served_target(target)
    write_export(draft, tmp_path / "export", {}, served)
    stored = load_file(tmp_path / "export" / WEIGHTS)
    # Engines read experts one by one of every family.
    assert stored.keys() == draft.target_tensors().keys()
    assert not any(name.endswith("gate_up_proj") for name in stored)
    read = load_draft(tmp_path / "export", target, torch.bfloat16)
    for name, tensor in draft.state_dict().items():
        found = read.state_dict()[name]
        assert found.dtype == (torch.float32 if name.endswith(BIAS) else torch.bfloat16), name
        assert torch.equal(found, tensor.to(found.dtype)), name


QUANTIZERS = {"fp8 blocks": fp8_blocks, "NVFP4": partial(nvfp4, llm_compressor=True)}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_quantized_layer_is_dequantized_and_served_beside_the_target(kind, tiny_target, tmp_path):
    plain = write_with_layer("glm4_moe", tmp_path / "plain", Path(tiny_target.path))
    folder = shutil.copytree(plain, tmp_path / "quantized")
    expected, stored = load_file(plain / WEIGHTS), load_file(plain / WEIGHTS)
    matrices = [name for name in stored if name.startswith("model.layers.4.") and "_proj.weight" in name]
    for name in matrices:
        if name.endswith("eh_proj.weight"):
            continue  # published unquantized
        parts, module = QUANTIZERS[kind](stored.pop(name).float()), name.removesuffix(".weight")
        stored |= {f"{module}.{last}": tensor for last, tensor in parts.items()}
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    draft, exact = draft_for(folder), draft_for(plain)
    for (name, found), whole in zip(draft.named_parameters(), exact.parameters(), strict=True):
        error = (found - whole).norm() / whole.norm()
        quantized = "_proj" in name
        assert 0.001 < error < (0.05 if kind == "fp8 blocks" else 0.2) if quantized else error == 0, name
    assert expected.keys() != stored.keys()
    with pytest.raises(Refusal, match="is quantized, and this one is not"):
        stitch(draft, folder, tmp_path / "stitched")


def test_layers_that_are_absent_or_of_another_kind_are_refused(tiny_target, tmp_path):
    qwen = write_with_layer("qwen3_5", tmp_path / "qwen", Path(tiny_target.path))
    wanted, tensors = draft_for(qwen).target_tensors(), load_file(qwen / WEIGHTS)
    cases = {
        "holds no MTP layer": {name: tensor for name, tensor in tensors.items() if "mtp." not in name},
        "lacks mtp.norm.weight": {name: tensor for name, tensor in tensors.items() if name != "mtp.norm.weight"},
        "also has mtp.layers.0.mlp.experts": tensors | {"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2)},
        "reads float, fp8 and NVFP4 only": tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].to(torch.int8)},
        "layer with the draft's sizes has": tensors | {"mtp.norm.weight": torch.zeros(3)},
    }
    for number, (why, given) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        save_file(given, tmp_path / str(number) / WEIGHTS)
        (tmp_path / str(number) / "config.json").write_text("{}")
        with pytest.raises(Refusal, match=why):
            OwnLayer.find(tmp_path / str(number), wanted)
