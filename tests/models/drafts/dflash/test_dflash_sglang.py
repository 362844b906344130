"""Our DFlash against SGLang's own class: it loads what we write, and says the same of the same features."""

import json
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.sglang.command import sglang_python
from models.config.dflash import DFlashConfig
from models.drafts.blocks.layers import Blocks
from models.drafts.dflash.module import DFlashDraft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import ServedTarget
from models.export.sglang import write_export

SCRIPT = Path(__file__).parents[1] / "block_logits_in_sglang.py"
HIDDEN, VOCABULARY, AUX, LENGTH = 24, 60, (0, 2, 3), 21
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Largest difference of a logit, in their standard deviations."""
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "mask_token_id": 11}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
SHAPES = {
    "full": {"layer_types": ("full_attention",) * 2, "num_kv_heads": 4, "rope_theta": 50_000.0},
    "sliding": SLIDING,
    "sliding and seeing ahead": SLIDING | {"sliding_sees_ahead": True},
    "normed": SLIDING | {"fc_norm": True},
    "biases and llama3 rope": {"attention_bias": True, "rope_scaling": LLAMA3, "rope_theta": 500.0},
    "partial yarn rope": {"partial_rotary_factor": 0.5, "rope_scaling": LLAMA3 | {"rope_type": "yarn"}},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "fc_norm": True},
}


def make_draft(changes: dict) -> DFlashDraft:
    torch.manual_seed(5)
    knobs = {"block_size": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 40}
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    draft = DFlashDraft(DFlashConfig(**(knobs | changes)), torch.randn(VOCABULARY, HIDDEN), every, AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_sglangs_class(name, dtype, exports):
    draft, folder = make_draft(SHAPES[name]).to(dtype), exports[name, dtype]
    said = json.loads((folder / "outputs.json").read_text())
    assert said == {"block_size": 5, "target_layer_ids": list(AUX)}
    given = load_file(folder / "inputs.safetensors")
    block = Blocks(given["token"], torch.tensor([LENGTH]), torch.tensor([0]))
    ours = draft.logits(draft.fill(block, draft.feature_keys(given["aux"], torch.arange(LENGTH))))[0]
    theirs = load_file(folder / "outputs.safetensors")["logits"]
    assert ours.std() > 1
    assert (ours - theirs).abs().max() < ERRORS[dtype] * ours.std()
