"""Our DFlash 2 against SGLang's own class: it loads what we write, and says the same of the same features."""

import json
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.sglang.command import sglang_python
from models.config.dflash2 import DFlash2Config
from models.drafts.blocks.layers import Blocks
from models.drafts.dflash2.module import DFlash2Draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import ServedTarget
from models.export.sglang import write_export

SCRIPT = Path(__file__).parents[1] / "block_logits_in_sglang.py"
HIDDEN, VOCABULARY, AUX, LENGTH, BLOCK, CANDIDATES = 24, 60, (0, 2, 3), 21, 5, 6
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Largest difference of a score, in their standard deviations."""
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "mask_token_id": 11}
SHAPES = {
    "full": {"layer_types": ("full_attention",) * 2, "rope_theta": 50_000.0},
    "three taps": {"conv_kernel_size": 3, "conv_group_size": 4} | SLIDING,
}


def make_draft(changes: dict) -> DFlash2Draft:
    torch.manual_seed(5)
    knobs = {"block_size": BLOCK, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 40}
    knobs |= {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": CANDIDATES}
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    draft = DFlash2Draft(DFlash2Config.model_validate(knobs | changes), torch.randn(VOCABULARY, HIDDEN), every, AUX)
    for name, parameter in draft.named_parameters():
        loud = "codebook" in name
        torch.nn.init.normal_(parameter, float("norm" in name or "base" in name), 1.0 if loud else 0.2)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    return draft


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, sglang_that_forks: None) -> dict[tuple[str, torch.dtype], Path]:
    """Exports with inputs, and what SGLang made of them, by the names of their shapes and the target's data type."""
    folders = {variant: tmp_path_factory.mktemp("export") for variant in product(SHAPES, ERRORS)}
    for (name, dtype), folder in folders.items():
        draft = make_draft(SHAPES[name])
        write_export(draft, folder, {}, ServedTarget(dtype, context_length=4096, num_layers=4))
        given = {"aux": torch.randn(LENGTH, len(AUX) * HIDDEN), "embedding": draft.embedding, "head": draft.head}
        given = {key: tensor.to(dtype) for key, tensor in given.items()}
        save_file(given | {"token": torch.tensor([7])}, folder / "inputs.safetensors")
    command = [str(sglang_python()), str(SCRIPT), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_scores_equal_those_of_sglangs_class(name, dtype, exports):
    draft, folder = make_draft(SHAPES[name]).to(dtype), exports[name, dtype]
    said = json.loads((folder / "outputs.json").read_text())
    assert said == {"block_size": BLOCK, "target_layer_ids": list(AUX)}
    given, theirs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    candidates = theirs["candidates"]
    block = Blocks(given["token"], torch.tensor([LENGTH]), torch.tensor([0]))
    normed = draft.fill(block, draft.feature_keys(given["aux"], torch.arange(LENGTH)))
    before = [given["token"], *(row[:1] for row in candidates)]
    ours = torch.cat(list(draft.step_logits(normed, lambda step: before[step])))
    plain = draft.logits(normed[0])
    assert ours.isfinite().sum(-1).tolist() == [CANDIDATES] * (BLOCK - 1)
    assert (ours - plain)[ours.isfinite()].std() > 0.3, "the selector matters"
    found = ours.gather(1, candidates)
    # In bfloat16 the weakest candidates may be others.
    agreed = found.isfinite()
    assert agreed[:, :4].all()
    assert bool(agreed.all()) or dtype != torch.float32
    assert (found - theirs["scores"])[agreed].abs().max() < ERRORS[dtype] * plain.std()
