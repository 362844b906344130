"""`python -m models.targets.prepare RUN_FOLDER`: makes the target a local Hugging Face folder, writes target.json."""

import hashlib
import re
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from infra.files.atomic import sha256_file, write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.recipe import check_layers, read_config
from models.config.target import TargetConfig
from models.data.hub import model_folder
from models.targets.gguf_package import converted_package
from models.targets.tiny import trained_tiny
from models.targets.weights import tensor_files

_HUB_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "LICENSE*"]


def prepare_target(config: TargetConfig) -> TargetRecord:
    """Find, download, convert or train the target, and check that its hidden states can be captured.

    Raises:
        Refusal: a missing folder, package or Hub id, no network, or an unsupported architecture.
    """
    revision = None
    if config.source == "tiny":
        folder = trained_tiny(config.name)
    elif config.source == "gguf-package":
        folder = converted_package(config.name)
    else:
        folder = model_folder("target.name", config.name, config.revision, _HUB_FILES)
        if not Path(config.name).expanduser().is_dir() and _HUB_COMMIT.fullmatch(folder.name):
            revision = folder.name
    text = _checked(folder, config.aux_layer_ids)
    return TargetRecord(
        name=config.name,
        path=str(folder),
        revision=revision or _files_hash(folder),
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        licence=config.licence,
    )


def _checked(folder: Path, aux_layer_ids: tuple[int, ...]) -> PretrainedConfig:
    """The text model's configuration. Raises Refusal if hidden states cannot be captured from the target."""
    if not (folder / "config.json").is_file():
        raise Refusal(f"{folder} is no Hugging Face folder: it has no config.json")
    tensor_files(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise Refusal(f"{folder} is not a causal language model with a tokenizer: {error}") from error
    layers = getattr(model.get_decoder(), "layers", None)
    head = model.get_output_embeddings()
    text = config.get_text_config()
    if layers is None or len(layers) != text.num_hidden_layers:
        raise Refusal(f"{folder}: the architecture {config.model_type!r} has no decoder layers to capture from")
    if head is None or getattr(head, "bias", None) is not None:
        raise Refusal(f"{folder}: the architecture {config.model_type!r} has no plain output head (or one with bias)")
    check_layers(aux_layer_ids, len(layers))
    return text


def _files_hash(folder: Path) -> str:
    """Hash of weights, configuration and tokenizer."""
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"), *folder.glob("*.jinja"))):
        digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()[:40]


def summary(record: TargetRecord) -> str:
    """One line about the target."""
    return (
        f"target: {record.name} ({record.model_type}, {record.num_layers} layers, hidden {record.hidden_size}, "
        f"vocabulary {record.vocab_size}) at {record.path}"
    )


def main() -> None:
    if len(sys.argv) != 2:
        raise Refusal("usage: python -m models.targets.prepare RUN_FOLDER")
    folder = RunFolder(Path(sys.argv[1]))
    config = read_config(folder.config)
    record = prepare_target(config.target)
    write_atomically(folder.target, record)
    print(summary(record))


if __name__ == "__main__":
    run_main(main)
