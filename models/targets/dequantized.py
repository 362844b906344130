"""A quantized target as a floating-point model: what its hidden states are compared with."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from models.targets.architecture import model_class, read_model_config
from models.targets.quantization import PACKED, StoredMatrix
from models.targets.weights import tensor_files

NO_WEIGHTS = ("_scale", "_scale_inv", "_scale_2", "_global_scale", ".scales", ".qzeros", ".g_idx", "_shape")
"""Ends of the names of tensors that are a part of a stored weight, or that quantize activations and the cache."""


def load_dequantized(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a target whose fp8 and NVFP4 weights are dequantized.

    transformers dequantizes fp8 only, and blocks of 128 wrongly where they do not divide a weight (5.23). Raises
    Refusal for packed weights.
    """
    files, weights = tensor_files(folder), dict[str, torch.Tensor]()
    for name, file in files.items():
        module, _, last = name.rpartition(".")
        if last in ("weight", *PACKED):
            weights[f"{module}.weight"] = StoredMatrix.find(folder, files, module).read(dtype)
        elif not name.endswith(NO_WEIGHTS):
            with safe_open(folder / file, framework="pt") as opened:
                weights[name] = opened.get_tensor(name)
    config = read_model_config(folder)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")  # declared nowhere, so pyright knows no such attribute to delete
    kind = model_class(config)._model_mapping[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
