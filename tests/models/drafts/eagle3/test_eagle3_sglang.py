"""Our EAGLE-3 against SGLang's own class: it loads what we export, and says the same, step after step."""

import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.sglang.command import sglang_python
from models.config.eagle3 import Eagle3Config
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import ServedTarget
from models.export.sglang import write_export

SCRIPT = Path(__file__).parent / "sglang_logits.py"
HIDDEN, VOCABULARY, AUX, LENGTH, STEPS = 24, 60, (0, 2, 3), 21, 4
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Largest difference of a logit, in their standard deviations."""
MLA = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
SHAPES = {
    "draft vocabulary": {"vocab_size": 32},
    "norms of 3.1": {"vocab_size": 32, "fc_norm": True, "norm_output": True, "rms_norm_eps": 1e-3},
    "one norm": {"norm_before_fc": True, "num_kv_heads": 4, "rope_theta": 50_000.0},
    "the target's head": {"vocab_size": None, "shared_head": True},
    "two layers": {"vocab_size": 32, "layer_types": ("full_attention",) * 2},
    "a smaller draft": {"vocab_size": 32, "hidden_size": 16, "fc_norm": True},
    "a wider draft": {"hidden_size": 40},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "yarn rope": {"rope_scaling": YARN, "rope_theta": 50_000.0},
    "yarn rope with mscale": {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}},
    "partial rope": {"partial_rotary_factor": 0.5},
    # Without scaling SGLang's class does not run on a CPU.
    "mla": {
        "mla": MLA,
        "vocab_size": 32,
        "rope_theta": 500.0,
        "rope_scaling": YARN | {"factor": 1.0, "original_max_position_embeddings": 64},
    },
    "mla, 3.1, yarn": {"mla": MLA, "rope_scaling": YARN, "fc_norm": True, "norm_output": True},
    "mla, the target's head, yarn with mscale": {
        "mla": MLA,
        "shared_head": True,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "partial yarn rope": {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
}


def make_draft(changes: dict) -> Eagle3Draft:
    torch.manual_seed(5)
    knobs = {"num_heads": 4, "intermediate_size": 40, "vocab_size": None} | changes
    config = Eagle3Config(**(({} if "mla" in changes else {"num_kv_heads": 2, "head_dim": 16}) | knobs))
    ids = torch.randperm(VOCABULARY)[: config.vocabulary_size(VOCABULARY)].sort().values
    draft = Eagle3Draft(config, torch.randn(VOCABULARY, HIDDEN), DraftVocabulary(ids, VOCABULARY), AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    return draft.eval()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, sglang_that_forks: None) -> dict[tuple[str, torch.dtype], Path]:
    """Exports with inputs, and what SGLang made of them, by the names of their shapes and the target's data type."""
    folders = {variant: tmp_path_factory.mktemp("export") for variant in product(SHAPES, ERRORS)}
    for (name, dtype), folder in folders.items():
        draft = make_draft(SHAPES[name])
        write_export(draft, folder, {}, ServedTarget(dtype, context_length=4096, num_layers=4))
        given = {"aux": torch.randn(LENGTH, len(AUX) * HIDDEN)}
        given |= {"embedding": draft.embed_tokens.weight.clone(), "head": draft.lm_head.weight.clone()}
        given = {key: tensor.to(dtype) for key, tensor in given.items()}
        save_file(given | {"tokens": torch.arange(7, 7 + LENGTH + STEPS - 1)}, folder / "inputs.safetensors")
    command = [str(sglang_python()), str(SCRIPT), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_sglangs_class(name, dtype, exports):
    draft, folder = make_draft(SHAPES[name]).to(dtype), exports[name, dtype]
    given, said = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    tokens = torch.cat([given["tokens"], torch.zeros(LENGTH, dtype=torch.long)])
    steps = draft.unroll(
        tokens[:LENGTH], given["aux"], [LENGTH], STEPS, lambda step, _normed: tokens[step : step + LENGTH]
    )
    every, *later = (draft.logits(normed) for normed in steps)
    ours = torch.cat([every, *(logits[-1:] for logits in later)])
    assert ours.std() > 0.5
    assert ours.shape == said["logits"].shape
    assert (ours - said["logits"]).abs().max() < ERRORS[dtype] * ours.std()
    if not draft.vocabulary.whole:
        assert torch.equal(said["target_ids"], draft.vocabulary.target_ids)
