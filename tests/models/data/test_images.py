"""Conversations with images: the target's own tokens for them, masks that do not move, files beside the samples."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from transformers import AutoTokenizer

from infra.records.data_path import SamplesRecord, TargetRecord
from models.config.data import DataConfig
from models.config.recipe import load_recipe
from models.data.conversations import read_documents
from models.data.images import ImageProcessor
from models.data.loss_mask import runs_of
from models.data.prepare import REFUSED, prepare_samples, summary
from models.data.sample_set import SampleSet
from tests.models.seeing_targets import seeing_target, write_pictures

RECIPES = Path(__file__).parents[3] / "recipes"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_target: Any) -> TargetRecord:
    return seeing_target(request.param, tmp_path_factory.mktemp(request.param), tiny_target.path)


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return write_pictures(tmp_path / "pictures", 6)


def part(image: Any, kind: str = "image") -> dict[str, Any]:
    return {"type": kind, kind: image}


def asked(content: Any, answer: str, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]} | beside


def prepared(target: TargetRecord, tmp_path: Path, records: list[dict[str, Any]], **settings: Any) -> SamplesRecord:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = {"source": str(source), "images": str(tmp_path / "pictures"), "min_tokens": 2} | settings
    return prepare_samples(DataConfig(**given), target, add_bos=False)


def samples_of(record: SamplesRecord) -> list[Any]:
    sets = [SampleSet.open(Path(record.path), split) for split in ("train", "heldout")]
    return [one for samples in sets for one in (samples[index] for index in range(len(samples)))]


def test_every_form_of_an_image_is_the_same_sample(target: TargetRecord, pictures: list[str], tmp_path: Path) -> None:
    name = pictures[0]
    content = (tmp_path / "pictures" / name).read_bytes()
    address = "data:image/png;base64," + base64.b64encode(content).decode()
    text = {"type": "text", "text": "What is this?"}
    forms = [
        asked([part(name), text], "A square."),
        asked([{"type": "image_url", "image_url": {"url": name}}, text], "A square."),
        asked([{"type": "image", "path": name}, text], "A square."),
        asked([part(address), text], "A square."),
        asked("<image>\nWhat is this?", "A square.", image=name),
        asked("What is this?", "A square.", images=[name]),
        asked([{"type": "image"}, text], "A square.", images=[name]),
    ]
    found = set()
    for form in forms:
        others = [asked(f"What is {number}?", "A number.") for number in range(3)]
        samples = samples_of(prepared(target, tmp_path, [form, *others]))
        (seen,) = (sample for sample in samples if sample.images)
        found.add((seen.id, tuple(seen.tokens.tolist())))
        assert [path.read_bytes() for path in seen.images] == [content]
    assert len(found) == 1


def test_masks_decode_to_what_the_assistant_said(target: TargetRecord, pictures: list[str], tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(target.path)
    turns = [
        {"role": "user", "content": [part(pictures[0]), {"type": "text", "text": "First?"}]},
        {"role": "assistant", "content": "The first one."},
        {"role": "user", "content": [{"type": "text", "text": "And"}, part(pictures[1]), part(pictures[2])]},
        {"role": "assistant", "content": "Two more."},
    ]
    others = [asked(f"What is {number}?", "A number.") for number in range(5)]
    record = prepared(target, tmp_path, [{"messages": turns}, *others])
    (seen,) = (sample for sample in samples_of(record) if sample.images)
    said = [str(tokenizer.decode(seen.tokens[start:end])) for start, end in runs_of(seen.loss_mask.numpy())]
    assert said == ["The first one.</s>", "Two more.</s>"]
    assert [path.read_bytes() for path in seen.images] == [
        (tmp_path / "pictures" / name).read_bytes() for name in pictures[:3]
    ]
    # The target's own processor makes the same tokens of the same text.
    processor: Any = ImageProcessor(Path(target.path))
    mark = processor.mark
    shown = f"<|vision_start|>{mark}<|vision_end|>" if "vision" in mark or "image_pad" in mark else mark
    text = (
        f"<s>user\n{shown}First?</s>\n<s>assistant\nThe first one.</s>\n<s>user\nAnd{shown}{shown}</s>\n<s>assistant\n"
    )
    opened = [Image.open(tmp_path / "pictures" / name).convert("RGB") for name in pictures[:3]]
    whole = processor._processor(images=opened, text=text, add_special_tokens=False)["input_ids"][0]
    assert seen.tokens[: len(whole)].tolist() == list(whole)


def test_an_image_that_would_be_cut_leaves_its_conversation_out(
    target: TargetRecord, pictures: list[str], tmp_path: Path
) -> None:
    long = [{"role": "user", "content": [part(pictures[0]), {"type": "text", "text": "First?"}]}]
    long += [{"role": "assistant", "content": "word " * 60}, {"role": "user", "content": [part(pictures[1])]}]
    long += [{"role": "assistant", "content": "Two."}]
    early = [*long[:1], {"role": "assistant", "content": "word " * 60}]
    others = [asked(f"What is {number}?", "A number.") for number in range(5)]
    record = prepared(target, tmp_path, [{"messages": long}, {"messages": early}, *others], max_tokens=64)
    seen = [sample for sample in samples_of(record) if sample.images]
    assert (record.dropped, record.truncated) == (1, 1)
    assert [len(sample.tokens) for sample in seen] == [64]
    assert all(len(sample.images) == 1 for sample in seen)


BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (part("nowhere.png"), "cannot be read below data.images"),
    "elsewhere": (part("https://example.org/1.png"), "is somewhere else: download"),
    "above": (part("../source.jsonl"), "is no path below data.images"),
    "absolute": (part("/etc/hostname"), "is no path below data.images"),
    "no picture": (part("note.txt"), "an image cannot be opened"),
    "no base64": (part("data:image/png;base64,%%"), "is no base64"),
    "video": (part("1.mp4", "video"), "turn 1 holds a video"),
    "no address": ({"type": "image"}, "turn 1 holds an image"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_shown_is_left_out_and_listed(
    case: str, tiny_target: Any, pictures: list[str], tmp_path: Path
) -> None:
    target = seeing_target("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    (tmp_path / "pictures" / "note.txt").write_text("no picture")
    wrong, message = BROKEN[case]
    records = [asked([wrong, {"type": "text", "text": "What?"}], "A thing.")]
    records += [asked([part(pictures[0]), {"type": "text", "text": f"{number}?"}], "A number.") for number in range(4)]
    record = prepared(target, tmp_path, records)
    assert record.refused == 1
    (listed,) = (Path(record.path) / REFUSED).read_text().splitlines()
    assert listed.startswith(f"{tmp_path}/source.jsonl:1: ")
    assert message in listed
    assert f"; {record.with_images} of them with images" in summary(record)


def test_a_template_that_shows_no_images_is_named(tiny_target: Any, pictures: list[str], tmp_path: Path) -> None:
    target = seeing_target("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    template = tmp_path / "blind.jinja"
    template.write_text(
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content if m.content is string else m.content[-1].text }}</s>\n"
        "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    records = [asked([part(pictures[0]), {"type": "text", "text": "What?"}], "A thing.")]
    records += [asked(f"What is {number}?", "A number.") for number in range(4)]
    record = prepared(target, tmp_path, records, chat_template=str(template))
    assert "the chat template shows 0 of 1 images" in record.refusals[0]


def test_images_inside_the_records_need_no_folder(tiny_target: Any, pictures: list[str], tmp_path: Path) -> None:
    """As `data:` addresses and as Parquet's bytes; a path is refused, with the remedy."""
    target = seeing_target("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    files = [(tmp_path / "pictures" / name).read_bytes() for name in pictures]
    addresses = ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
    records = [asked([part(one), {"type": "text", "text": "What?"}], "A thing.") for one in addresses]
    records.append(asked([part(pictures[0]), {"type": "text", "text": "What?"}], "A thing."))
    record = prepared(target, tmp_path, records, images="embedded")
    assert {path.read_bytes() for sample in samples_of(record) for path in sample.images} == set(files)
    assert "set data.images to the folder that it is relative to" in record.refusals[0]
    bytes_inside = [{"bytes": file, "path": name} for file, name in zip(files, pictures, strict=True)]
    table = {
        "messages": [[{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A thing."}]] * len(files),
        "images": [[one] for one in bytes_inside],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "source.parquet")
    other = prepared(target, tmp_path, [], images="embedded", source=str(tmp_path / "source.parquet"))
    assert {sample.id for sample in samples_of(other)} == {sample.id for sample in samples_of(record)}


def test_a_photo_is_turned_as_its_camera_noted(tiny_target: Any, pictures: list[str], tmp_path: Path) -> None:
    target = seeing_target("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    wide, noted = Image.new("RGB", (112, 56), "red"), Image.Exif()
    noted[0x0112] = 6  # a quarter turn
    wide.save(tmp_path / "pictures" / "noted.jpg", exif=noted)
    wide.rotate(-90, expand=True).save(tmp_path / "pictures" / "turned.png")
    processor, kinds = ImageProcessor(Path(target.path)), torch.tensor([0, *[target.media_ids[0]] * 8])
    grids = [
        processor.inputs(kinds, [tmp_path / "pictures" / name])["image_grid_thw"].tolist()
        for name in ("noted.jpg", "turned.png")
    ]
    assert grids == [[[1, 8, 4]]] * 2


def test_changed_images_are_prepared_anew(tiny_target: Any, pictures: list[str], tmp_path: Path) -> None:
    target = seeing_target("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    records = [asked([part(name), {"type": "text", "text": f"{name}?"}], "A thing.") for name in pictures]
    first = prepared(target, tmp_path, records)
    assert prepared(target, tmp_path, records).path == first.path
    Image.new("RGB", (70, 70), "red").save(tmp_path / "pictures" / pictures[0])
    assert prepared(target, tmp_path, records).dataset_hash != first.dataset_hash


def test_without_data_images_the_message_names_the_setting(
    tiny_target: Any, pictures: list[str], tmp_path: Path
) -> None:
    target = seeing_target("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    records = [asked([part(pictures[0]), {"type": "text", "text": "What?"}], "A thing.")]
    records += [asked(f"What is {number}?", "A number.") for number in range(4)]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    record = prepare_samples(DataConfig(source=str(source), min_tokens=2), target, add_bos=False)
    assert record.refused == 1
    assert "set data.images to the images' folder" in record.refusals[0]
    (document, *_) = read_documents(str(source))
    assert document.images == (pictures[0],)


def test_recipes_whose_images_would_not_be_learned_are_refused() -> None:
    pictures = ["data.images=pictures", "data.chat_template=tokenizer"]
    for own in ("draft.train_embeddings=true", "draft.hidden_size=64"):
        with pytest.raises(ValueError, match=r"data\.images: a draft with embeddings of its own cannot read"):
            load_recipe(RECIPES / "tiny.yaml", [*pictures, own])
    assert load_recipe(RECIPES / "tiny.yaml", pictures).embedded
    assert not load_recipe(RECIPES / "tiny.yaml", ["draft={method: medusa}", *pictures]).embedded
    with pytest.raises(ValueError, match="only a chat template knows"):
        load_recipe(RECIPES / "tiny.yaml", ["draft={method: medusa}", "data.images=pictures"])


def test_a_sample_with_another_image_is_another_sample(tiny_target: Any, pictures: list[str], tmp_path: Path) -> None:
    """Tokens alone do not tell two pictures of one size apart."""
    target = seeing_target("qwen2_5_vl", tmp_path / "target", tiny_target.path)
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (56, 56), colour).save(tmp_path / "pictures" / name)
    records = [asked([part(name), {"type": "text", "text": "Which?"}], "This.") for name in ("a.png", "b.png")]
    records += [asked([part(pictures[0]), {"type": "text", "text": "Or?"}], "That.")]
    samples = [sample for sample in samples_of(prepared(target, tmp_path, records)) if len(sample.images)]
    assert len({sample.id for sample in samples}) == 3
    assert any(torch.equal(a.tokens, b.tokens) for a in samples for b in samples if a.id != b.id)
