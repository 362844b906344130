"""`python -m models.targets.prepare RUN_FOLDER`: makes the target a local Hugging Face folder, writes target.json."""

import functools
import hashlib
import re
import sys
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from transformers import AutoTokenizer, GgufConfig, PretrainedConfig

from infra.files.atomic import sha256_file, write_atomically
from infra.files.cached_folder import build_once
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.settings import cache_folder
from models.config.recipe import check_layers, read_config
from models.config.target import TargetConfig
from models.data.hub import model_folder
from models.data.tokenizer import read_tokenizer
from models.targets.architecture import decoder_of, media_ids, model_class, read_model_config, reads_media
from models.targets.model import eos_ids
from models.targets.quantization import read_quantization
from models.targets.rehearsal import rehearse
from models.targets.stored_shapes import check_stored
from models.targets.tiny import trained_tiny
from models.targets.weights import check_tied, find_target_head, tensor_files

PACKAGE_FORMAT = 1
"""Increment when the same package gives another folder."""
# With bfloat16 weights, prefill in bfloat16 and checks in float32 use the same values. The rounding (0.4 %) is far
# below that of the 4-bit weights, and Gemma was published in bfloat16.
PACKAGE_DTYPE = torch.bfloat16
_HUB_COMMIT = re.compile(r"[0-9a-f]{40}")
# Of remote code the configuration alone, which SGLang needs to serve some targets, if it is told to trust it.
_HUB_FILES = [
    "configuration_*.py",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "LICENSE*",
]
# Copies of the same weights in the format of their authors' own code (Llama, gpt-oss, Mistral), as large again. The
# pattern for safetensors would match them, as "*" matches "/". A repository that has no others is refused in any case.
_HUB_IGNORED = ["original/*", "metal/*", "consolidated*"]

# What decides a target's text. Anything else beside it, an evaluation's results for instance, may come and go.
_HASHED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "*processor_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.jinja",
]


def prepare_target(config: TargetConfig) -> TargetRecord:
    """Find, download, convert or train the target, and check that its hidden states can be captured.

    Raises Refusal: a missing folder, package or Hub id, no network, or an unsupported architecture.
    """
    revision = None
    if config.source == "tiny":
        folder = trained_tiny(config.name)
    elif config.source == "gguf-package":
        folder = converted_package(config.name)
    else:
        folder = model_folder("target.name", config.name, config.revision, _HUB_FILES, _HUB_IGNORED)
        if not Path(config.name).expanduser().is_dir() and _HUB_COMMIT.fullmatch(folder.name):
            revision = folder.name
    whole = _checked(folder, config.aux_layer_ids)
    text = whole.get_text_config()
    return TargetRecord(
        name=config.name,
        path=str(folder),
        revision=revision or _files_hash(folder),
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        licence=config.licence,
        eos_ids=tuple(sorted(eos_ids(folder))),
        quantization=read_quantization(folder),
        text_only=reads_media(whole),
        media_ids=media_ids(whole),
    )


def converted_package(name: str) -> Path:
    """The folder of a Python package's GGUF target, converted once, which takes about a minute.

    Raises Refusal: the package is not installed, or does not ship exactly one GGUF file.
    """
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise Refusal(f"target.name: the package {name!r} is not installed: pip install {name}") from error
    folder = cache_folder() / "targets" / f"{name}-{version}-{PACKAGE_FORMAT}"

    def build(aside: Path) -> None:
        with Console(stderr=True).status(f"converting {name}, once (about a minute)"):
            _convert(name, aside)

    build_once(folder, build)
    return folder


def _convert(name: str, aside: Path) -> None:
    file = _gguf_file(name, aside)
    # transformers 5.23.0 reads the file for the configuration, the weights and the tokenizer's type, and each time its
    # 260,000 strings: once is enough, and the type is known.
    with mock.patch.object(gguf, "GGUFReader", functools.cache(_read_gguf)):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            # Otherwise the weights stay packed and cannot be saved.
            quantization_config=GgufConfig(dequantize=True),
            dtype=PACKAGE_DTYPE,
        )
    model.save_pretrained(aside)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, tokenizer_type=model.config.model_type)
    tokenizer.save_pretrained(aside)
    if file.parent == aside:
        file.unlink()


def _read_gguf(file: Path, read: type[gguf.GGUFReader] = gguf.GGUFReader) -> gguf.GGUFReader:
    """Through a plain array, of which gguf 0.19.0's million slices take 3 s; of a mapped one, 12 s."""

    def mapped(*arguments: Any, memmap: type[np.memmap] = np.memmap, **named: Any) -> np.ndarray:
        return memmap(*arguments, **named).view(np.ndarray)

    with mock.patch.object(np, "memmap", mapped):
        return read(file)


def _gguf_file(name: str, aside: Path) -> Path:
    """The package's GGUF file; packages that ship it in parts have a function `assemble(path)`."""
    module = import_module(name.replace("-", "_"))
    if hasattr(module, "assemble"):
        try:
            return Path(module.assemble(aside / "package.gguf"))
        except FileNotFoundError as error:
            raise Refusal(f"the package {name!r} is incomplete ({error}): install it again") from error
    files = [Path(str(file.locate())) for file in metadata.files(name) or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise Refusal(f"target.name: the package {name!r} ships {len(files)} GGUF files, not one")
    return files[0]


def _checked(folder: Path, aux_layer_ids: tuple[int, ...]) -> PretrainedConfig:
    """The target's configuration. Raises Refusal if hidden states cannot be captured from the target."""
    if not (folder / "config.json").is_file():
        raise Refusal(f"{folder} is no Hugging Face folder: it has no config.json")
    tensor_files(folder)
    try:
        config = read_model_config(folder)
        with torch.device("meta"):
            model = model_class(config).from_config(config)
        read_tokenizer(folder)
        eos_ids(folder)
    # transformers raises the last ones for settings of another type than it wants, and for missing ones.
    except (ValueError, OSError, StrictDataclassError, LookupError, TypeError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise Refusal(
                f"{folder}: transformers {transformers.__version__} knows this target by code of its repository alone, "
                "which is never run here: choose another target, or a newer transformers that has its architecture"
            ) from error
        reason = " ".join(str(error).split())
        raise Refusal(
            f"{folder} is not a causal language model with a tokenizer that transformers can read: {reason}"
        ) from error
    layers = getattr(decoder_of(model), "layers", None)
    head = model.get_output_embeddings()
    text = config.get_text_config()
    if layers is None or len(layers) != text.num_hidden_layers:
        raise Refusal(f"{folder}: the architecture {config.model_type!r} has no decoder layers to capture from")
    if head is None or getattr(head, "bias", None) is not None:
        raise Refusal(f"{folder}: the architecture {config.model_type!r} has no plain output head (or one with bias)")
    check_layers(aux_layer_ids, len(layers))
    find_target_head(folder)
    check_stored(folder)
    check_tied(folder)
    rehearse(config)
    return config


def _files_hash(folder: Path) -> str:
    """Hash of weights, configuration, tokenizer, processors and chat templates."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _HASHED for path in folder.glob(pattern) if path.is_file()}):
        digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()[:40]


def _begun(folder: RunFolder) -> TargetRecord | None:
    """The target that a resumed run began with; None for a new run, or where its record is damaged."""
    with suppress(FileNotFoundError, Refusal):
        return TargetRecord.read(folder.target)
    return None


def as_begun(config: TargetConfig, begun: TargetRecord | None) -> TargetConfig:
    """The target of a run that may be resumed: from the Hub at the commit that it began with, whatever is newest."""
    if begun is None or Path(begun.path).name != begun.revision:  # a snapshot of the Hub is named after its commit
        return config
    return config.model_copy(update={"revision": begun.revision})


def main() -> None:
    if len(sys.argv) != 2:
        raise Refusal("usage: python -m models.targets.prepare RUN_FOLDER")
    folder = RunFolder(Path(sys.argv[1]))
    config, begun = read_config(folder.config), _begun(folder)
    record = prepare_target(as_begun(config.target, begun))
    if begun is not None and record.revision != begun.revision:
        raise Refusal(
            f"the target {record.path} has changed since the run began (its revision is {record.revision[:12]}, and "
            f"was {begun.revision[:12]}): put it back, or start a new run"
        )
    record = record.model_copy(update={"text_only": record.text_only and config.data.images is None})
    write_atomically(folder.target, record)
    print(
        f"target: {record.name} ({record.model_type}, {record.num_layers} layers, hidden {record.hidden_size}, "
        f"vocabulary {record.vocab_size}) at {record.path}"
    )
    if record.text_only:
        print(
            "the target reads more than text: the draft learns from text alone, and may propose worse after an image; "
            "data.images shows it the images of the data"
        )


if __name__ == "__main__":
    run_main(main)
