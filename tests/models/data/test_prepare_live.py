"""The first requests of a run that learns from users, divided."""

import json
from pathlib import Path

import pytest

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.config.data import DataConfig
from models.data.prepare import prepare_live
from models.data.sample_set import SampleSet
from tests.models.chat_templates import CHATML, make_tokenizer

QUESTION = "How can I export all my invoices of last year as one file?"


@pytest.fixture
def prepared(tiny_target: TargetRecord, tmp_path: Path):
    """Texts of the requests that are learned and held out, of those that were collected."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "target")
    target = tiny_target.model_copy(update={"path": str(tmp_path / "target")})

    def prepare(*collected: str, places: int = 8) -> dict[str, list[str]]:
        run, ids = RunFolder(tmp_path), [tokenizer(text, add_special_tokens=False)["input_ids"] for text in collected]
        run.live.write_text("".join(json.dumps({"input_ids": one, "prompt": 2}) + "\n" for one in ids))
        prepare_live(run, DataConfig(source="live", max_tokens=64, max_samples=places), target, add_bos=False)
        texts = dict[str, list[str]]()
        for split in ("learned", "held out"):
            samples = SampleSet.open(tmp_path / "samples", "train" if split == "learned" else "heldout")
            texts[split] = [str(tokenizer.decode(samples[n].tokens.tolist())) for n in range(len(samples))]
            texts[split] = [text for n, text in enumerate(texts[split]) if samples.prompts[n] == 0]
            if split == "learned":
                assert len(samples) == places
        return texts

    return prepare


def chat(minute: int, answer: str) -> str:
    system = f"<|im_start|>system\nYou help. It is 10:{minute:02d}.<|im_end|>\n"
    return f"{system}<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"


def test_half_is_held_out_and_the_rest_learned(prepared) -> None:
    texts = prepared("one", "two two", "three", "four four")
    assert {split: sorted(of_split) for split, of_split in texts.items()} == {
        "learned": ["one", "two two"],
        "held out": ["four four", "three"],
    }


def test_a_dialogue_that_is_held_out_is_not_learned(prepared) -> None:
    """A clock in the system prompt makes no other dialogue of it, nor does another answer."""
    texts = prepared("a question", chat(1, "Go to billing."), chat(2, "Ask support."), "another question")
    assert texts["learned"] == ["a question"]
    assert len(texts["held out"]) == 2
