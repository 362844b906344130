"""What a benchmark's numbers depend on: whether the target reasons."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from infra.records.data_path import TargetRecord
from models.benchmark.conditions import Counter, conditions
from models.config.benchmark import BenchmarkConfig
from models.targets.model import TargetModel


@pytest.fixture(scope="module")
def model(tiny_target: TargetRecord) -> TargetModel:
    return TargetModel.load(Path(tiny_target.path), (0,), torch.float32)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("two and two?", "four", False),
        ("two and two?", "<think>hm</think>four", True),
        ("two and two?", "<think> </think>four", False),
        ("two and two?<think>", "hm", True),
        ("Is <think>hm</think> a tag? I was asked that by somebody who wanted to know it.", "yes", False),
    ],
)
def test_conditions_say_whether_the_target_reasons(
    model: TargetModel, tiny_target: TargetRecord, tmp_path: Path, prompt: str, text: str, expected: bool
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_target.path)
    (tmp_path / "model.safetensors").write_text("weights")
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text)]
    found = conditions(
        BenchmarkConfig(), Counter.reference(model), target=tiny_target, draft=tmp_path, dataset_hash="d",
        template_hash="t", prompts=1, texts=[([2], [3]), (ids[0], ids[1])],
    )  # fmt: skip
    assert found.thinking == expected
