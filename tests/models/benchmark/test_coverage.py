"""How much of the target's probability a draft vocabulary holds, and whether the target reasons."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.records.data_path import TargetRecord
from models.benchmark.conditions import Counter, conditions
from models.benchmark.measure import POSITIONS, vocabulary_mass
from models.config.benchmark import BenchmarkConfig
from models.drafts.vocabulary import DraftVocabulary
from models.targets.model import TargetModel


@pytest.fixture(scope="module")
def model(tiny_target: TargetRecord) -> TargetModel:
    return TargetModel.load(Path(tiny_target.path), (0,), torch.float32)


def test_it_is_the_share_of_the_whole_distribution(model: TargetModel, tiny_target: TargetRecord) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts, texts = (torch.randint(2, 1000, (3, n), generator=generator).tolist() for n in (5, 9))
    texts[2] = texts[2][:1]
    vocabulary = DraftVocabulary(torch.arange(0, tiny_target.vocab_size, 3), tiny_target.vocab_size)
    found = vocabulary_mass(model, vocabulary, prompts, texts, 0.7)
    plain: Any = AutoModelForCausalLM.from_pretrained(tiny_target.path)
    by_hand = []
    for prompt, text in zip(prompts, texts, strict=True):
        for place in range(len(text)):
            with torch.no_grad():
                logits = plain(torch.tensor([prompt + text[:place]])).logits[0, -1]
            by_hand.append(float((logits / 0.7).softmax(-1)[::3].sum()))
    assert len(by_hand) == 19
    assert found == pytest.approx(sum(by_hand) / 19, abs=1e-5)


def test_a_whole_vocabulary_holds_all_and_texts_beyond_the_first_positions_are_not_looked_at(
    model: TargetModel, tiny_target: TargetRecord
) -> None:
    whole = DraftVocabulary(torch.arange(tiny_target.vocab_size), tiny_target.vocab_size)
    assert vocabulary_mass(model, whole, [[2]], [[3]], 1.0) == 1.0
    half = DraftVocabulary(torch.arange(500), tiny_target.vocab_size)
    long = [[number % 900 + 2 for number in range(POSITIONS)]]
    first = vocabulary_mass(model, half, [[2]], long, 1.0)
    assert vocabulary_mass(model, half, [[2], [3]], [*long, [4]], 1.0) == first


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
