"""What preflight says of a run that can go on."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.config.recipe import load_recipe
from models.preflight import check_settings
from models.run import RunWithTarget

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], ""),
        (
            ["draft.qk_norm=true", "draft.attention_bias=true"],
            "SGLang does not serve a draft with attention_bias, qk_norm: it is exported for vLLM, and measured by the "
            "reference decoder\n",
        ),
        (
            ["draft.fc_bias=true"],
            "SGLang does not serve a draft with fc_bias: it is exported and measured by the reference decoder\n",
        ),
        (
            ["draft={method: eagle3, num_heads: 2, intermediate_size: 16, mla: {q_lora_rank: null}, vocab_size: 512}"],
            "SGLang does not serve a draft with mla.q_lora_rank of null: it is exported and measured by the reference "
            "decoder\n",
        ),
    ],
)
def test_a_draft_that_sglang_does_not_serve_is_named_before_it_is_trained(changes, said, tmp_path, capsys):
    sizes = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "target")
    options = ["draft.vocab_size=512", "generator.engine=sglang", "benchmark.served_concurrency=[1]"]
    config, folder = load_recipe(TINY, [*options, *changes]), RunFolder(tmp_path / "run")
    folder.path.mkdir()
    target = TargetRecord(
        name="t", path=str(tmp_path / "target"), revision="2" * 40, hidden_size=32, num_layers=3, vocab_size=600,
        model_type="llama", licence="x",
    )  # fmt: skip
    capsys.readouterr()
    check_settings(RunWithTarget(folder, config, target))
    assert capsys.readouterr().out == said
