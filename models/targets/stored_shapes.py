"""Names and shapes of a target's stored weights against those of its architecture; no weights are read."""

from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from infra.refusal import Refusal
from models.targets.architecture import check_loaded, floating_config, load_weights
from models.targets.quantization import FLOATS, FP8, read_quantization
from models.targets.weights import tensor_files

VOCABULARIES = ("embed_tokens.weight", "lm_head.weight")


def check_stored(folder: Path) -> None:
    """Raise Refusal unless the files of a target hold every weight that its architecture reads text with.

    transformers itself loads weights without content, because it renames and stacks them in ways of its own.
    """
    config = floating_config(folder)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what does not fit is told by the refusal, and again at each loading
    transformers.logging.disable_progress_bar()
    try:
        model, info = load_weights(config, _stored(folder), device_map="meta", ignore_mismatched_sizes=True)
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    if read_quantization(folder) is not None:
        vectors = {name for name in info["missing_keys"] if model.get_parameter_or_buffer(name).ndim == 1}
        info = info | {"missing_keys": vectors}
    check_loaded(folder, model, info)
    for name, stored, own in sorted(info["mismatched_keys"]):
        setting = "vocab_size" if name.endswith(VOCABULARIES) else "the sizes"
        raise Refusal(
            f"{folder}: {name} is {list(stored)}, and with its config.json the architecture has {list(own)}: correct "
            f"{setting} in its config.json, or save the model again with save_pretrained"
        )


def _stored(folder: Path) -> dict[str, Tensor]:
    """The stored weights by name, without content.

    Of a quantized target vectors and vocabularies alone: the names and shapes of other matrices are their format's.
    """
    quantized, found = read_quantization(folder) is not None, dict[str, Tensor]()
    for file in sorted(set(tensor_files(folder).values())):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                stored = opened.get_slice(name)
                shape = stored.get_shape()
                plain = name.endswith(VOCABULARIES) and stored.get_dtype() in FLOATS | FP8
                if plain or not quantized or len(shape) == 1:
                    found[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return found
