"""What a target's `config.json` decides of a draft's: data type, context length, number of layers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models.targets.architecture import context_length, read_model_config


@dataclass(frozen=True)
class ServedTarget:
    """A target as engines serve it with their default arguments."""

    dtype: torch.dtype
    """Data type of the draft's weights."""
    context_length: int
    num_layers: int
    architectures: tuple[str, ...] = ()
    tree: Mapping[str, Any] = field(default_factory=dict)
    """Its `config.json`, which a draft that the target comes with is served by."""

    @property
    def settings(self) -> dict[str, Any]:
        """The same in a draft's `config.json`; older readers take `torch_dtype`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "dtype": dtype,
            "torch_dtype": dtype,
            "max_position_embeddings": self.context_length,
            "num_target_layers": self.num_layers,
        }


def read_served_target(folder: Path) -> ServedTarget:
    """Read the `config.json` of the target's Hugging Face folder."""
    config = read_model_config(folder)
    text = config.get_text_config()
    # Configurations of multimodal targets may give the data type for all parts at once.
    declared = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    dtype, architectures = _dtype(declared, text.model_type), tuple(config.architectures or ())
    tree = json.loads((folder / "config.json").read_text())
    return ServedTarget(dtype, context_length(text), text.num_hidden_layers, architectures, tree)


def _dtype(declared: torch.dtype | str | None, model_type: str) -> torch.dtype:
    """The data type that gives a draft the one in which SGLang's default (`--dtype auto`) serves the target.

    SGLang converts each model by its own configuration (0.5.23, configs/model_config.py, `_get_and_verify_dtype`), and
    then multiplies the target's hidden states with the draft's weights as they are. Of a float32 model it makes
    float16, of a float32 Gemma bfloat16. vLLM serves a draft in its target's data type, whatever is declared.
    """
    name = str(declared or torch.float32).removeprefix("torch.")
    if name == "float32":
        return torch.bfloat16 if model_type.startswith("gemma") else torch.float32
    return torch.float16 if name == "float16" else torch.bfloat16
