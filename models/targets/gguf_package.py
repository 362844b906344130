"""A target from a Python package with one GGUF file, converted once into a plain Hugging Face folder."""

from importlib import import_module, metadata
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from infra.files.cached_folder import build_once
from infra.refusal import Refusal
from infra.settings import cache_folder

FORMAT = 1
"""Increment when the same package gives another folder."""

# With bfloat16 weights, prefill in bfloat16 and checks in float32 use the same values. The rounding (0.4 %) is far
# below that of the 4-bit weights, and Gemma was published in bfloat16.
STORED_DTYPE = torch.bfloat16


def converted_package(name: str) -> Path:
    """The folder of the package's target. The first conversion takes about a minute.

    Raises:
        Refusal: the package is not installed, or does not ship exactly one GGUF file.
    """
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise Refusal(f"target.name: the package {name!r} is not installed: pip install {name}") from error
    folder = cache_folder() / "targets" / f"{name}-{version}-{FORMAT}"

    def build(aside: Path) -> None:
        with Console(stderr=True).status(f"converting {name}, once (about a minute)"):
            _convert(name, aside)

    build_once(folder, build)
    return folder


def _convert(name: str, aside: Path) -> None:
    gguf = _gguf_file(name, aside)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # Otherwise the weights stay packed and cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
        dtype=STORED_DTYPE,
    )
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    if gguf.parent == aside:
        gguf.unlink()


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
