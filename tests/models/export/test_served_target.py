"""What a draft takes from its target: SGLang's own code reads both alike, with default arguments."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.sglang.command import sglang_python
from models.config.draft import parse_draft_config
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import write_export

SCRIPT = Path(__file__).parent / "sglang_model_config.py"
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
QWEN3 = SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40_960}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10_240}
MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "dtype": "bfloat16"}
GEMMA3 = SIZES | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}

TARGETS: dict[str, tuple[dict[str, Any], tuple[torch.dtype, int]]] = {
    "bfloat16, a million tokens": (
        LLAMA | {"torch_dtype": "bfloat16", "max_position_embeddings": 1_048_576},
        (torch.bfloat16, 1_048_576),
    ),
    "float16": (LLAMA | {"dtype": "float16"}, (torch.float16, 4096)),
    "float32": (LLAMA | {"dtype": "float32"}, (torch.float32, 4096)),
    "none": (LLAMA, (torch.float32, 4096)),
    "float32 Gemma": (GEMMA3 | {"dtype": "float32", "max_position_embeddings": 8192}, (torch.bfloat16, 8192)),
    "Llama 3's RoPE": (
        LLAMA | {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 1024}, "dtype": "bfloat16"},
        (torch.bfloat16, 4096),
    ),
    "linear RoPE": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}, (torch.float32, 16_384)),
    "YaRN": (QWEN3 | {"rope_scaling": YARN, "dtype": "bfloat16"}, (torch.bfloat16, 40_960)),
    "multimodal": (MISTRAL3 | {"text_config": LLAMA}, (torch.bfloat16, 4096)),
}
LAYER = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32}
EAGLE3, DFLASH = LAYER | {"method": "eagle3", "vocab_size": None}, LAYER | {"method": "dflash", "block_size": 4}


@pytest.mark.timeout(300)
def test_sglang_reads_target_and_draft_alike_with_default_arguments(tmp_path, sglang_that_forks):
    folders = [tmp_path / str(number) for number in range(2 * len(TARGETS))]
    for index, folder in enumerate(folders):
        settings, expected = list(TARGETS.values())[index // 2]
        (folder / "target").mkdir(parents=True)
        (folder / "target" / "config.json").write_text(json.dumps(settings))
        target, config = read_served_target(folder / "target"), parse_draft_config((EAGLE3, DFLASH)[index % 2])
        assert (target.dtype, target.context_length, target.num_layers) == (*expected, 5)
        draft = build_draft(config, torch.zeros(64, 32), DraftVocabulary(torch.arange(64), 64), (1, 2))
        write_export(draft, folder / "draft", {}, target)
    command = [str(sglang_python()), str(SCRIPT), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder, read in zip(folders, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert read["draft"][:2] == read["target"][:2], folder
        assert read["draft"][2] >= read["target"][1], folder


def test_a_model_type_that_transformers_does_not_know(tmp_path):
    settings = LLAMA | {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    target = read_served_target(tmp_path)
    assert (target.dtype, target.context_length, target.num_layers) == (torch.bfloat16, 4096, 5)
    assert target.architectures == ("MiMoForCausalLM",)
