"""A target's `config.json`, and what it leaves to other files and to transformers' defaults."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.refusal import Refusal

MODELOPT_FILE = "hf_quant_config.json"
"""Where NVIDIA ModelOpt describes its quantization, often without a `quantization_config` in `config.json`."""
GEMMA3_TEXT: dict[str, Any] = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "sliding_window": 4096,
    "vocab_size": 262_208,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
"""`transformers.Gemma3TextConfig()`, with the `rope_theta` of its full-attention layers."""
# The published Gemma 3 4B, 12B and 27B leave out what equals the default. The planner may not import transformers.
DEFAULTS: dict[str, Mapping[str, Any]] = {"gemma3_text": GEMMA3_TEXT}
"""Values of keys that a text model's configuration may leave out, by its `model_type`."""


def read_target_config(file: Path) -> dict[str, Any]:
    """A target's `config.json`, completed by `DEFAULTS`. Raises Refusal if it cannot be read or is no JSON object."""
    try:
        tree = json.loads(file.read_text())
    except OSError as error:
        raise Refusal(f"{file} cannot be read ({error.strerror}): target.name needs a Hugging Face folder") from error
    except ValueError as error:
        raise Refusal(f"{file} is not JSON ({error}): fetch the target again") from error
    if not isinstance(tree, dict):
        raise Refusal(f"{file} holds a {type(tree).__name__}, not a target's configuration: fetch the target again")
    text = tree.get("text_config") or tree
    if not isinstance(text, dict):
        raise Refusal(f"{file}: text_config is a {type(text).__name__}, not an object: fetch the target again")
    completed = {**DEFAULTS.get(str(text.get("model_type")), {}), **text}
    return completed if text is tree else {**tree, "text_config": completed}


def with_modelopt(config: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """`config` with the quantization of ModelOpt's `file`, where it has none of its own.

    `file` may be missing. Raises Refusal if it is damaged.
    """
    if config.get("quantization_config") or file is None or not file.is_file():
        return dict(config)
    try:
        quantization = json.loads(file.read_text()).get("quantization") or {}
    except (ValueError, AttributeError) as error:
        raise Refusal(f"{file} does not hold ModelOpt's quantization ({error}): fetch the target again") from error
    return {**config, "quantization_config": quantization}
