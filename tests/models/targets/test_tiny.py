"""The tiny target is trained for real, from its recipe alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from infra.records.data_path import SamplesRecord, TargetRecord
from models.config.recipe import RunConfig
from models.data.sample_set import SampleSet
from models.targets.model import TargetModel
from models.targets.prepare import prepare_target
from models.targets.tiny import TinyRecipe, train_model, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_target: TargetRecord) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_target.path)


def test_it_has_learned_the_text(tiny_target: TargetRecord, tiny_samples: SamplesRecord) -> None:
    target = TargetModel.load(Path(tiny_target.path), [0], torch.float32)
    heldout = SampleSet.open(Path(tiny_samples.path), "heldout")
    losses = []
    for index in range(40):
        tokens = heldout[index].tokens
        logits = target.logits(target.forward(tokens[None, :-1]).last[0])
        losses.append(functional.cross_entropy(logits, tokens[1:], reduction="none"))
    loss = torch.cat(losses).mean().item()
    assert loss < 5.0, "ln(1024) = 6.9 is what an untrained model has"


def test_its_greedy_text_is_varied(tiny_target: TargetRecord, tiny_samples: SamplesRecord) -> None:
    target = TargetModel.load(Path(tiny_target.path), [0], torch.float32)
    heldout = SampleSet.open(Path(tiny_samples.path), "heldout")
    prompts = torch.stack([heldout[index].tokens[:64] for index in range(200) if len(heldout[index].tokens) > 64][:24])
    cache, step, emitted = target.new_cache(), prompts, []
    for _ in range(64):
        step = target.logits(target.forward(step, cache).last[:, -1]).argmax(-1, keepdim=True)
        emitted.append(step)
    text = torch.cat(emitted, dim=1)
    assert len(text.unique()) / text.numel() > 0.05
    assert torch.tensor([len(row.unique()) / 64 for row in text]).mean() > 0.25


def test_it_is_trained_once(tiny_config: RunConfig, tiny_target: TargetRecord) -> None:
    weights = Path(tiny_target.path) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert prepare_target(tiny_config.target) == tiny_target
    assert weights.stat().st_mtime_ns == before


def test_the_seed_decides_everything() -> None:
    recipe = TinyRecipe(vocab_size=300, hidden_size=24, intermediate_size=32, steps=4, length=16, warmup=2)
    stream = torch.randint(2, 300, (400,), generator=torch.Generator().manual_seed(0))

    def weights(recipe: TinyRecipe) -> torch.Tensor:
        return torch.cat([weight.flatten() for weight in train_model(stream, recipe).state_dict().values()])

    first = weights(recipe)
    torch.rand(3)
    assert torch.equal(first, weights(recipe))
    assert not torch.equal(first, weights(TinyRecipe(**{**vars(recipe), "seed": 1})))


@given(text=st.text(max_size=60))
def test_the_tokenizer_loses_nothing(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 0
    assert max(ids) < 1024
    assert tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) == text


def test_the_vocabulary_has_the_size_that_was_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 1024
    small = train_tokenizer(["some text, again some text"] * 5, TinyRecipe(vocab_size=260))
    assert len(small) == 260
