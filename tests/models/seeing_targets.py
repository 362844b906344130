"""Tiny targets that read images: a family's real architecture, its image processor, and a chat template with images."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer

from infra.records.data_path import TargetRecord
from models.config.target import TargetConfig
from models.targets.prepare import prepare_target

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from mtp_families import LAYOUTS, add_layer
from target_families import FAMILIES, write

MTP = "draft={method: mtp}"
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")
SETTINGS = ["data.chat_template=tokenizer", "data.overlong=truncate", "data.heldout_share=0.3"]
SETTINGS += ["training.samples_per_step=4", "training.log_steps=1", "training.heldout_steps=2"]
SETTINGS += ["training.heldout_prompts=2", "benchmark.max_new_tokens=6", "target.aux_layer_ids=[0, 1, 2]"]
MEDUSA = "draft={method: medusa, heads: 3, vocab_size: 512}"
EAGLE3 = (
    "draft={method: eagle3, vocab_size: 512, num_heads: 2, num_kv_heads: 2, head_dim: 8, intermediate_size: 16, "
    "ttt_steps: 3}"
)
QWEN_TOKENS = {
    "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
    "<|vision_start|>": "vision_start_token_id",
    "<|vision_end|>": "vision_end_token_id",
}
GEMMA_TOKENS = {
    "<image_soft_token>": "image_token_index",
    "<start_of_image>": "boi_token_index",
    "<end_of_image>": "eoi_token_index",
}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2}
QWEN_IMAGES |= {"merge_size": 2, "min_pixels": 784, "max_pixels": 784 * 16}
GEMMA_IMAGES = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}, "do_resize": True}
KINDS: dict[str, tuple[dict[str, str], str, dict[str, Any], str]] = {
    "qwen2_5_vl": (QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>", QWEN_IMAGES, "Qwen2_5_VLProcessor"),
    "qwen3_vl": (
        QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        QWEN_IMAGES | {"patch_size": 16},
        "Qwen3VLProcessor",
    ),
    "qwen3_5": (
        QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        QWEN_IMAGES | {"patch_size": 16},
        "Qwen3VLProcessor",
    ),
    "gemma3": (GEMMA_TOKENS, "<start_of_image>", GEMMA_IMAGES, "Gemma3Processor"),
}
"""Special tokens, what stands for an image in the template, and the processor's settings, by family."""


def seeing_target(name: str, folder: Path, tokenizer: str, layers: tuple[int, ...] = (0, 1, 3)) -> TargetRecord:
    """A target of the family with random weights, which reads images."""
    tokens, mark, images, processor = KINDS[name]
    family, vocabulary = FAMILIES[name], len(AutoTokenizer.from_pretrained(tokenizer))
    ids = {key: vocabulary + place for place, key in enumerate(tokens.values())}
    settings = family.settings | {"vocab_size": vocabulary + 8}
    write(replace(family, settings=settings, wrapper=family.wrapper | ids), folder, Path(tokenizer))
    if name in LAYOUTS:
        add_layer(name, folder)
    words = AutoTokenizer.from_pretrained(tokenizer)
    words.add_special_tokens({"additional_special_tokens": list(tokens)})
    words.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"processor_class": processor}
    if name == "gemma3":
        marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        settings |= {"extra_special_tokens": marks, "model_specific_special_tokens": marks}
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": processor, "image_seq_length": family.wrapper["mm_tokens_per_image"]})
        )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(images | {"processor_class": processor}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", mark))
    # As Qwen2.5-VL's makers recommend, but more: nothing here but the makers' temperature and top-p is taken from it.
    recommended = {"do_sample": True, "temperature": 1.0, "repetition_penalty": 5.0}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return prepare_target(TargetConfig(name=str(folder), aux_layer_ids=layers))


def write_pictures(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Pictures of noise of several sizes. Returns their names."""
    draws, names = np.random.default_rng(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        height, width = draws.integers(30, 90, 2)
        names.append(f"{number}.png")
        Image.fromarray(draws.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / names[-1])
    return names


def write_source(folder: Path, count: int = 16) -> Path:
    """Half of the questions are about a picture."""
    names = write_pictures(folder / "pictures", count)
    source = folder / "source.jsonl"
    with source.open("w") as file:
        for number, name in enumerate(names):
            text: Any = {"type": "text", "text": f"What is number {number}?"}
            content = [{"type": "image", "image": name}, text] if number % 2 else text["text"]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "It is a module. " * 4}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return source
