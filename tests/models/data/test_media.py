"""Multimodal targets learn from text alone: what else their data holds is left out, counted and listed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.config.data import DataConfig
from models.config.recipe import load_recipe
from models.config.target import TargetConfig
from models.data.conversations import read_documents
from models.data.prepare import REFUSED, prepare_samples, summary
from models.data.sample_set import SampleSet
from models.preflight import check_prompts
from models.regeneration.regenerate import regenerate
from models.run import RunWithTarget
from models.targets.prepare import prepare_target
from tests.models.chat_templates import CHATML

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from target_families import FAMILIES, write

RECIPES = Path(__file__).parents[3] / "recipes"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
WITH_MEDIA: dict[str, tuple[Any, Any, str]] = {
    "a part": ([{"type": "text", "text": "What is this?"}, PICTURE], {}, "turn 1 holds an image"),
    "nothing but a part": ([{"type": "image"}], {}, "turn 1 holds an image"),
    "Parquet's columns": ([{"type": "text", "text": "a", "image": None}, {"image": "b"}], {}, "turn 1 holds an image"),
    "sound": ([{"type": "input_audio", "input_audio": {"data": "aa"}, "text": "a"}], {}, "turn 1 holds sound"),
    "beside the turns": ("<image>\nWhat is this?", {"image": "coco/1.jpg"}, "the record holds an image"),
    "sound beside": ("<audio>\nWhat is said?", {"audio": "1.wav"}, "the record holds sound"),
    "a file beside": ("What is said?", {"audio": {"path": "1.wav", "bytes": "aa"}}, "the record holds sound"),
    "several beside": ("What are these?", {"images": ["1.jpg", "2.jpg"]}, "the record holds an image"),
}
WITHOUT: dict[str, tuple[Any, Any]] = {
    "parts of text": ([{"type": "text", "text": "What is an image?"}], {}),
    "empty columns": ("What is a video?", {"images": [], "image": None, "video": ""}),
    "notes on a transcript": ("What was said?", {"audio": True, "video": "meeting-17", "type": "image"}),
    "Parquet's empty columns": ([{"type": "text", "text": "Which image_url?", "image_url": None}], {}),
}


def record(content: Any, beside: Any, answer: str = "It is a module.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]} | beside


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.mark.parametrize("case", WITH_MEDIA)
def test_records_with_more_than_text_say_what(case: str, tmp_path: Path) -> None:
    content, beside, held = WITH_MEDIA[case]
    (document,) = read_documents(str(write_lines(tmp_path / "a.jsonl", [record(content, beside)])))
    assert document.media == held


@pytest.mark.parametrize("case", WITHOUT)
def test_records_that_only_speak_of_images_are_text(case: str, tmp_path: Path) -> None:
    (document,) = read_documents(str(write_lines(tmp_path / "a.jsonl", [record(*WITHOUT[case])])))
    assert not document.media


def multimodal(name: str, folder: Path, tokenizer: str, template: str = CHATML) -> TargetRecord:
    """A tiny target that reads images, with a chat template."""
    write(FAMILIES[name], folder, Path(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    return prepare_target(TargetConfig(name=str(folder), aux_layer_ids=(0, 1)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Fourteen questions, of which every case with more than text is one."""
    texts = [record(f"What is module {number}?", {}) for number in range(6)]
    return write_lines(tmp_path / "mixed.jsonl", [*texts, *(record(*case[:2]) for case in WITH_MEDIA.values())])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("template", ["tokenizer", "none"])
def test_a_multimodal_target_learns_from_the_text_alone(
    name: str, template: str, source: Path, tiny_target: TargetRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    target = multimodal(name, tmp_path / "target", tiny_target.path)
    assert target.text_only
    assert target.media_ids
    config = DataConfig(source=str(source), chat_template=template)
    samples = prepare_samples(config, target, add_bos=False)
    assert (samples.train_samples + samples.heldout_samples, samples.refused) == (6, 8)
    assert "8 refused" in summary(samples)
    listed = (Path(samples.path) / REFUSED).read_text().splitlines()
    assert [line.partition(": ")[0] for line in listed] == [f"{source}:{number}" for number in range(7, 15)]
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    for split in ("train", "heldout"):
        for sample in SampleSet.open(Path(samples.path), split):
            assert "What is module" in str(tokenizer.decode(sample.tokens))
    with pytest.raises(ValueError, match=r"8 of 14 conversations cannot be used(.|\n)*mixed\.jsonl:7: turn 1 holds an"):
        prepare_samples(config.model_copy(update={"max_refused_share": 0.1}), target, add_bos=False)


def test_text_with_a_placeholder_of_an_image_is_left_out(
    tiny_target: TargetRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    target = multimodal("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    placeholder = str(AutoTokenizer.from_pretrained(target.path).decode([target.media_ids[0]]))
    questions = [f"What is module {number}?" for number in range(5)]
    records = [record(question, {}) for question in [*questions, f'What is "{placeholder}"?']]
    samples = prepare_samples(
        DataConfig(source=str(write_lines(tmp_path / "a.jsonl", records)), chat_template="tokenizer"), target, False
    )
    assert samples.refused == 1
    assert f"{tmp_path}/a.jsonl:6: the text holds a token that stands for an image" in samples.refusals[0]
    overrides = [f"data.source={tmp_path}/a.jsonl", "data.chat_template=tokenizer", "data.overlong=truncate"]
    overrides += ["data.regeneration={max_new_tokens: 4}", "target.aux_layer_ids=[0]"]
    run = RunWithTarget(RunFolder(tmp_path / "run"), load_recipe(RECIPES / "tiny.yaml", overrides), target)
    answered = regenerate(run)
    assert (answered.documents, answered.refusals) == (5, samples.refusals)


def test_regeneration_asks_no_question_with_an_image(
    source: Path, tiny_target: TargetRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    target = multimodal("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    overrides = [f"data.source={source}", "data.chat_template=tokenizer", "data.overlong=truncate"]
    overrides += ["data.regeneration={max_new_tokens: 4}", "target.aux_layer_ids=[0]", "data.max_refused_share=0.6"]
    run = RunWithTarget(RunFolder(tmp_path / "run"), load_recipe(RECIPES / "tiny.yaml", overrides), target)
    check_prompts(run)
    answered = regenerate(run)
    assert (answered.documents, answered.refused) == (6, 8)
    assert answered.refusals[0].startswith(f"{source}:7: turn 1 holds an image")
    strict = load_recipe(RECIPES / "tiny.yaml", [*overrides, "data.max_refused_share=0.1"])
    with pytest.raises(ValueError, match="8 of 14 conversations cannot be used"):
        check_prompts(RunWithTarget(run.folder, strict, target))
