"""Our MTP layer against SGLang's own class: it loads what we write, and says the same of the same states."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.sglang.command import sglang_python
from models.config.mtp import MtpConfig
from models.drafts.mtp.module import MtpDraft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import ServedTarget
from models.export.sglang import write_export

SCRIPT = Path(__file__).with_name("mtp_logits_in_sglang.py")
HIDDEN, VOCABULARY, ROWS, STEPS = 32, 64, 11, 4
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Largest difference of a logit, in their standard deviations."""
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 40}
TREE = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 50_000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "use_sliding_window": False,
    "max_window_layers": 2,
}


def make_draft() -> MtpDraft:
    torch.manual_seed(5)
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    config = MtpConfig.model_validate(SIZES | {"family": "mimo", "attention_bias": True, "rope_theta": 50_000.0})
    draft = MtpDraft(config, torch.randn(VOCABULARY, HIDDEN), every, ())
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.2)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    return draft


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, sglang_that_forks: None) -> dict[torch.dtype, Path]:
    """Exports with inputs, and what SGLang made of them, by the target's data type."""
    folders = {dtype: tmp_path_factory.mktemp("export") for dtype in ERRORS}
    for dtype, folder in folders.items():
        draft = make_draft()
        write_export(draft, folder, {}, ServedTarget(dtype, context_length=4096, num_layers=2, tree=TREE))
        given = {
            "last": torch.randn(ROWS, HIDDEN),
            "embedding": draft.embed_tokens.weight,
            "head": draft.lm_head.weight,
        }
        given = {key: tensor.to(dtype) for key, tensor in given.items()}
        tokens = torch.randint(VOCABULARY, (ROWS + STEPS,))
        save_file(given | {"tokens": tokens}, folder / "inputs.safetensors")
    command = [str(sglang_python()), str(SCRIPT), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.parametrize("dtype", ERRORS)
@torch.no_grad()
def test_logits_equal_those_of_sglangs_class(dtype, exports):
    draft, folder = make_draft().to(dtype), exports[dtype]
    given, theirs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")["logits"]
    proposer, tokens = draft.proposers(1), given["tokens"]
    hidden = proposer.step(tokens[None, :ROWS], draft.fuse(given["last"]), torch.arange(ROWS)[None], ROWS)
    ours = [draft.logits(draft.norm(hidden))]
    for row in range(ROWS, ROWS + STEPS):
        fed_back, places = draft.norm(hidden[-1:]), torch.tensor([[row]])
        hidden = proposer.step(tokens[None, row : row + 1], fed_back, places, row + 1)
        ours.append(draft.logits(draft.norm(hidden)))
    found = torch.cat(ours)
    assert found.std() > 1
    assert (found - theirs).abs().max() < ERRORS[dtype] * found.std()
