"""A quantized target as a floating-point model: what its hidden states are compared with."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from accelerate import cpu_offload, init_empty_weights
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from infra.refusal import Refusal
from models.targets.architecture import check_loaded, floating_config, load_weights, model_class
from models.targets.quantization import PACKED, StoredMatrix
from models.targets.weights import tensor_files

NO_WEIGHTS = ("_scale", "_scale_inv", "_scale_2", "_global_scale", ".scales", ".qzeros", ".g_idx", "_shape")
"""Ends of the names of tensors that are a part of a stored weight, or that quantize activations and the cache."""


class DequantizedWeights(Mapping[str, Tensor]):
    """A target's weights by name, each read and dequantized on access.

    Raises Refusal for packed weights, before any is read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype):
        self._folder, self._dtype, self._files = folder, dtype, tensor_files(folder)
        parts = [name.rpartition(".") for name in self._files]
        modules = [module for module, _, last in parts if last in ("weight", *PACKED)]
        found = StoredMatrix.find_all(folder, self._files, modules)
        self._matrices = {f"{module}.weight": matrix for module, matrix in found.items()}
        others = [name for name in self._files if not name.endswith((*NO_WEIGHTS, *PACKED))]
        self._names = dict.fromkeys([*self._matrices, *others])

    def add_name(self, stored: str, name: str) -> None:
        """Add a second name for a stored matrix, for tied weights."""
        self._matrices[name] = self._matrices[stored]
        self._names[name] = None

    def __getitem__(self, name: str) -> Tensor:
        if name in self._matrices:
            return self._matrices[name].read(self._dtype)
        with safe_open(self._folder / self._files[name], framework="pt") as opened:
            found = opened.get_tensor(name)
        return found.to(self._dtype) if found.is_floating_point() else found

    def __contains__(self, name: object) -> bool:
        return name in self._names  # a mapping's own would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_dequantized(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a target whose fp8 and NVFP4 weights are dequantized.

    transformers dequantizes fp8 only, and blocks of 128 wrongly where they do not divide a weight (5.23). Raises
    Refusal for packed weights, and where weights are missing.
    """
    config, weights = floating_config(folder), dict(DequantizedWeights(folder, dtype))
    model, info = load_weights(config, weights, dtype=dtype)
    check_loaded(folder, model, info)
    return model


def stream_dequantized(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The same on the CPU in the memory of one module: weights are read and dequantized when their module runs.

    Raises Refusal for packed weights, and where transformers names weights otherwise than the files (experts).
    """
    config, weights = floating_config(folder), DequantizedWeights(folder, dtype)
    with init_empty_weights(include_buffers=False):
        model = model_class(config).from_config(config, dtype=dtype)
    model.tie_weights()
    own = dict(model.named_parameters(remove_duplicate=False))
    tied = [name for name, weight in own.items() if weight is model.get_input_embeddings().weight]
    for name in tied:
        if name not in weights and tied[0] in weights:
            weights.add_name(tied[0], name)
    unknown = [name for name in own if name not in weights]
    if unknown:
        raise Refusal(f"its files have no {unknown[0]}, as transformers calls it, so weights cannot be read one by one")
    cpu_offload(model, torch.device("cpu"), state_dict=weights)  # type: ignore[arg-type]
    return model.eval()
