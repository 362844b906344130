"""The target's own answers about images, as it gave them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.config.recipe import load_recipe
from models.data.conversations import read_documents
from models.data.images import ImageProcessor
from models.data.loss_mask import runs_of
from models.data.prepare import prepare_samples
from models.data.sample_set import SampleSet
from models.decoding.after_images import continue_seen
from models.regeneration.regenerate import regenerate
from models.run import RunWithTarget
from models.targets.model import TargetModel
from tests.conftest import memory_folder
from tests.models.seeing_targets import seeing_target, write_pictures

RECIPES = Path(__file__).parents[3] / "recipes"
WORDS = 6


@pytest.fixture
def task_of(tmp_path: Path, tiny_target: TargetRecord, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunWithTarget]:
    """Conversations of one and two turns, of which two in three begin with an image, to be answered anew."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))

    def make(family: str, *overrides: str) -> RunWithTarget:
        target = seeing_target(family, tmp_path / family, tiny_target.path)
        names, source = write_pictures(tmp_path / "pictures", 12), tmp_path / "source.jsonl"
        with source.open("w") as file:
            for number, name in enumerate(names):
                content: Any = f"What is number {number}?"
                if number % 3:
                    content = [{"type": "image", "image": name}, {"type": "text", "text": content}]
                turns = [{"role": "user", "content": content}]
                if number % 2:
                    turns += [{"role": "assistant", "content": "?"}, {"role": "user", "content": "And then?"}]
                file.write(json.dumps({"messages": turns}) + "\n")
        settings = [
            f"data.source={source}", f"data.images={tmp_path / 'pictures'}", "data.chat_template=tokenizer",
            f"data.regeneration={{temperature: 0, max_new_tokens: {WORDS}}}", "data.overlong=truncate",
            "data.max_tokens=512", "target.aux_layer_ids=[0]", "data.min_tokens=2", "data.heldout_share=0.3",
            "draft={method: medusa, heads: 2, vocab_size: 512}", *overrides,
        ]  # fmt: skip
        return RunWithTarget(RunFolder(tmp_path / "run"), load_recipe(RECIPES / "tiny.yaml", settings), target)

    return make


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_answers_about_images_are_the_targets_own(family: str, task_of: Callable[..., RunWithTarget]) -> None:
    run = task_of(family)
    record = regenerate(run)
    path = Path(run.target.path)
    model, processor = TargetModel.load(path, (0,), torch.float32, sees=True), ImageProcessor(path)
    ends, parts, seen = frozenset((*run.target.eos_ids, *run.target.media_ids)), [], 0
    documents = list(read_documents(record.path))
    assert record.documents == len(documents) >= 8
    for document in documents:
        assert not document.media
        for part in document.tokens:
            files = [Path(run.config.data.images or "") / str(image) for image in part.images]
            for start, end in runs_of(part.loss_mask) if files else ():
                asked = torch.from_numpy(part.ids[:start]).long()
                given = processor.inputs(asked, files)
                assert part.ids[start:end].tolist() == continue_seen(model, asked, given, WORDS, ends)
                seen += 1
            parts.append((part.ids.tolist(), part.loss_mask.tolist(), [file.read_bytes() for file in files]))
    assert seen >= 8
    samples = prepare_samples(run.config.data.model_copy(update={"source": record.path}), run.target, add_bos=False)
    assert samples.with_images
    sides = [SampleSet.open(Path(samples.path), split) for split in ("train", "heldout")]
    trained = [
        (one.tokens.tolist(), one.loss_mask.tolist(), [image.read_bytes() for image in one.images])
        for side in sides
        for one in side
    ]
    assert sorted(trained) == sorted(parts)


def test_another_picture_is_another_answer(task_of: Callable[..., RunWithTarget]) -> None:
    run = task_of("qwen2_5_vl")
    first = regenerate(run)
    write_pictures(Path(run.config.data.images or ""), 12, seed=5)
    second = regenerate(run)
    assert first.path != second.path


def test_capture_while_answering_is_refused_with_images(task_of: Callable[..., RunWithTarget]) -> None:
    with pytest.raises(ValueError, match=r"data\.regeneration\.capture answers prompts of text alone"):
        task_of("qwen2_5_vl", f"data.regeneration={{max_new_tokens: {WORDS}, capture: true}}")


@pytest.mark.slow
def test_sglang_answers_about_images_as_transformers_does(
    task_of: Callable[..., RunWithTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = task_of("qwen3_vl")
    for path in (tmp_path / "pictures").iterdir():
        # Of a size that nobody scales: SGLang would round pixels otherwise.
        Image.open(path).resize((64, 96)).save(path)
    with memory_folder() as memory:
        monkeypatch.setenv("DRAFTSMITH_SHM", str(memory))
        generator = plain.config.generator.model_copy(update={"engine": "sglang"})
        served = replace(plain, config=plain.config.model_copy(update={"generator": generator}))
        records = [regenerate(run) for run in (plain, served)]
    ours, theirs = (list(read_documents(record.path)) for record in records)
    assert records[0].path != records[1].path
    for one, other in zip(ours, theirs, strict=True):
        assert [part.ids.tolist() for part in one.tokens] == [part.ids.tolist() for part in other.tokens]
        assert [part.images for part in one.tokens] == [part.images for part in other.tokens]
