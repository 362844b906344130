"""The target's architecture in transformers: its configuration, its model class, its decoder."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, DeepseekV3Config, PretrainedConfig, Qwen2Config

from infra.refusal import Refusal

# What reads weights is called as `transformers.X`, so that a process that reads configurations only does not import
# all modelling code (4 s).

SAME_AS: dict[str, type[PretrainedConfig]] = {"kimi_k2": DeepseekV3Config, "mimo": Qwen2Config}
"""Model types that transformers does not know, and whose architecture it has under another name."""

CONTEXT_LENGTH_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
"""Where engines look for a context length, in this order (SGLang 0.5.23, utils/hf_transformers/common.py)."""
DEFAULT_CONTEXT_LENGTH = 2048
"""Theirs for a configuration with none of these keys."""

_MEDIA_TOKEN = re.compile(r"(image|video|audio|media_placeholder)_token_(id|index)")


def read_model_config(folder: Path) -> PretrainedConfig:
    """The configuration of a local Hugging Face folder. Raises ValueError or OSError if transformers cannot read it.

    Code of the folder is never run, and nobody is asked on a terminal whether it may.
    """
    settings = json.loads((folder / "config.json").read_text())
    kind = SAME_AS.get(settings.get("model_type"))
    if kind is None:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return kind(**settings | {"model_type": kind.model_type})


def floating_config(folder: Path) -> PretrainedConfig:
    """The configuration of a quantized target as a floating-point model; of another one its own."""
    config = read_model_config(folder)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")  # declared nowhere, so pyright knows no such attribute to delete
    return config


def context_length(text: PretrainedConfig) -> int:
    """Tokens of a target's context, as SGLang derives it: it refuses a draft whose context is shorter."""
    scaling = getattr(text, "rope_scaling", None) or {}
    is_included = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1 if is_included else scaling.get("factor", 1)
    lengths = (getattr(text, key, None) for key in CONTEXT_LENGTH_KEYS)
    length = next((length for length in lengths if length is not None), None)
    return DEFAULT_CONTEXT_LENGTH if length is None else int(factor * length)


def model_class(config: PretrainedConfig, sees: bool = False) -> Any:
    """The Auto class for a target: its language model alone where there is one, else the multimodal model.

    `sees`: the multimodal model in any case.
    """
    alone = not sees and type(config) in transformers.AutoModelForCausalLM._model_mapping
    return transformers.AutoModelForCausalLM if alone else transformers.AutoModelForMultimodalLM


def reads_media(config: PretrainedConfig) -> bool:
    """Whether a target reads images, video or sound beside text."""
    return any(getattr(config, f"{part}_config", None) is not None for part in ("vision", "audio"))


def media_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """The placeholder tokens of images, video and sound, sorted; empty for a target that reads text alone."""
    named = {token for name, token in config.to_dict().items() if _MEDIA_TOKEN.fullmatch(name)}
    return tuple(sorted(token for token in named if isinstance(token, int)))


def load_model(
    folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu", sees: bool = False
) -> "transformers.PreTrainedModel":
    """Load a target, with the attention that transformers chooses for it. `sees`: it reads images.

    Raises Refusal where weights are missing.
    """
    config = read_model_config(folder)
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, info = model_class(config, sees).from_pretrained(folder, **options)
    check_loaded(folder, model, info, sees)
    # The folder's would be mixed into every call of `generate`, a penalty for repetition for instance.
    model.generation_config = transformers.GenerationConfig()
    return model.to(device)


def load_weights(
    config: PretrainedConfig, weights: dict[str, Tensor], **options: Any
) -> tuple["transformers.PreTrainedModel", dict[str, Any]]:
    """A target's model from weights by name, and what transformers tells of its loading.

    Like its Auto classes, which read weights from files alone.
    """
    kind = model_class(config)._model_mapping[type(config)]
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    return kind.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True, **options)


def check_loaded(
    folder: Path, model: "transformers.PreTrainedModel", info: Mapping[str, Any], sees: bool = False
) -> None:
    """Raise Refusal for weights that a target's files lack, which transformers fills with random numbers.

    `sees`: also for those that images alone are read with.
    """
    missing = sorted(info["missing_keys"])
    if not sees:
        modules = (decoder_of(model), model.get_output_embeddings())
        reading = [name for name, module in model.named_modules() if any(module is other for other in modules)]
        missing = [name for name in missing if name.startswith(tuple(f"{name}." for name in reading))]
    if not missing:
        return
    lost = f"{folder} lacks {len(missing)} of the architecture's weights, {missing[0]} first"
    for name in sorted(info["unexpected_keys"]):
        if name.endswith(f".{missing[0]}") or missing[0].endswith(f".{name}"):
            raise Refusal(
                f"{lost}, or has them under other names ({name}): save the plain model again with save_pretrained "
                "(after merge_and_unload() of PEFT's, and for a compiled one its _orig_mod)"
            )
    raise Refusal(f"{lost}: fetch its files again, or correct the sizes in its config.json")


def has_experts(config: PretrainedConfig) -> bool:
    """Whether the text model chooses among experts."""
    return any("experts" in name and value for name, value in config.get_text_config().to_dict().items())


def decoder_of(model: "transformers.PreTrainedModel") -> nn.Module | None:
    """The decoder inside a causal language model or a multimodal one: it has `layers` and the final `norm`."""
    decoder: Any = model.get_decoder()
    while decoder is not None and not hasattr(decoder, "layers") and hasattr(decoder, "model"):
        decoder = decoder.model
    return decoder


def sliding_window(text: PretrainedConfig) -> int | None:
    """Tokens that a text model's sliding layers see; None without such layers."""
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    return window if window and (types is None or "sliding_attention" in types) else None
