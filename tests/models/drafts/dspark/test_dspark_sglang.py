"""Our DSpark against SGLang's own class: it loads what we write, and says the same of the same features."""

import json
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.sglang.command import sglang_python
from models.config.dspark import DSparkConfig
from models.drafts.blocks.layers import Blocks
from models.drafts.dspark.module import DSparkDraft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import ServedTarget
from models.export.sglang import write_export

SCRIPT = Path(__file__).parents[1] / "block_logits_in_sglang.py"
HIDDEN, VOCABULARY, AUX, LENGTH, BLOCK = 24, 60, (0, 2, 3), 21, 5
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Largest difference of a logit, in their standard deviations."""
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
SHAPES = {
    "vanilla": {"layer_types": ("full_attention",) * 2, "rope_theta": 50_000.0},
    "gated": {"markov_head": "gated", "mask_token_id": 11, "confidence_reads_token": False} | SLIDING,
    "rnn": {"markov_head": "rnn", "sliding_sees_ahead": True, "attention_bias": True} | SLIDING,
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}


def make_draft(changes: dict) -> DSparkDraft:
    torch.manual_seed(5)
    knobs = {"block_size": BLOCK, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 40}
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    config = DSparkConfig.model_validate(knobs | {"markov_rank": 8} | changes)
    draft = DSparkDraft(config, torch.randn(VOCABULARY, HIDDEN), every, AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.2 if "markov" not in name else 1.0)
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
        previous = torch.tensor([7, 30, 2, 59, 7])
        save_file(given | {"token": previous[:1].clone(), "previous": previous}, folder / "inputs.safetensors")
    command = [str(sglang_python()), str(SCRIPT), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_logits_and_confidences_equal_those_of_sglangs_class(name, dtype, exports):
    draft, folder = make_draft(SHAPES[name]).to(dtype), exports[name, dtype]
    said = json.loads((folder / "outputs.json").read_text())
    assert said == {"block_size": BLOCK, "target_layer_ids": list(AUX)}
    given, theirs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    block = Blocks(given["token"], torch.tensor([LENGTH]), torch.tensor([0]))
    normed = draft.fill(block, draft.feature_keys(given["aux"], torch.arange(LENGTH)))
    ours = torch.cat(list(draft.step_logits(normed, lambda step: given["previous"][step : step + 1])))
    assert ours.std() > 1
    assert (ours - draft.logits(normed[0])).std() > 0.3, "the bias matters"
    assert (ours - theirs["logits"]).abs().max() < ERRORS[dtype] * ours.std()
    confidences = draft._confidence(normed[0], given["previous"])
    assert confidences.std() > 0.1
    assert (confidences - theirs["confidences"]).abs().max() < ERRORS[dtype]
