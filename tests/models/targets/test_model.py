"""Capture equals what transformers itself reports, for a trained target and for other families."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infra.records.data_path import TargetRecord
from models.targets.model import TargetModel, eos_ids
from tests.models.chat_templates import CHATML, make_tokenizer

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def random_gemma(soft_cap: float | None = None) -> Gemma3ForCausalLM:
    torch.manual_seed(1)
    # A window shorter than the text, so that sliding attention shows.
    config = Gemma3TextConfig(**SIZES, sliding_window=6, final_logit_softcapping=soft_cap, initializer_range=0.4)
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(config).eval()


def random_qwen() -> Qwen3ForCausalLM:
    torch.manual_seed(2)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.3)).eval()


def saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=["tiny", "gemma3", "gemma3-soft-cap", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "tiny":
        record: TargetRecord = request.getfixturevalue("tiny_target")
        return Path(record.path)
    makers: dict[str, Callable] = {
        "gemma3": random_gemma,
        "gemma3-soft-cap": lambda: random_gemma(soft_cap=3.0),
        "qwen3": random_qwen,
    }
    return saved(makers[request.param](), tmp_path)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(5))


def test_capture_equals_transformers(folder: Path, tokens: torch.Tensor) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(input_ids=tokens, output_hidden_states=True)
    target = TargetModel.load(folder, [0, 1], torch.float32)
    captured = target.forward(tokens)

    aux = torch.cat([expected.hidden_states[1], expected.hidden_states[2]], dim=-1)
    torch.testing.assert_close(captured.aux, aux, rtol=1e-5, atol=1e-5)
    # transformers' last entry is the output after the final norm.
    torch.testing.assert_close(captured.last, expected.hidden_states[-1], rtol=1e-5, atol=1e-5)
    logits = target.logits(captured.last.flatten(0, 1))
    torch.testing.assert_close(logits, expected.logits.flatten(0, 1), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.logits.flatten(0, 1).argmax(-1))


def test_cached_steps_and_right_padding_equal_one_forward(folder: Path, tokens: torch.Tensor) -> None:
    target = TargetModel.load(folder, [0, 1], torch.float32)
    whole = target.forward(tokens[:1])
    cache = target.new_cache()
    parts = [target.forward(tokens[:1, :13], cache), target.forward(tokens[:1, 13:], cache)]
    torch.testing.assert_close(torch.cat([part.aux for part in parts], 1), whole.aux, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([part.last for part in parts], 1), whole.last, rtol=1e-4, atol=1e-4)

    padded = tokens.clone()
    padded[0, 12:] = 0
    torch.testing.assert_close(target.forward(padded).last[0, :12], whole.last[0, :12], rtol=1e-4, atol=1e-4)


def test_layer_ids_beyond_the_target_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"the target has layers 0\.\."):
        TargetModel.load(folder, [1, 40], torch.float32)


def test_a_target_s_text_ends_where_any_of_its_files_says(tmp_path: Path) -> None:
    """Fine-tunes often name the end of a turn in one file, and keep the base model's end of text in the others."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    turn, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    LlamaConfig(eos_token_id=end).save_pretrained(tmp_path)
    assert eos_ids(tmp_path) == {turn, end}
    GenerationConfig(eos_token_id=[end, 7]).save_pretrained(tmp_path)
    assert eos_ids(tmp_path) == {turn, end, 7}
    (tmp_path / "tokenizer_config.json").unlink()
    LlamaConfig(eos_token_id=None).save_pretrained(tmp_path)
    assert eos_ids(tmp_path) == {end, 7}
