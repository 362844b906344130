"""Weights of a draft that are tensors of the target's own checkpoint: its MTP layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from infra.refusal import Refusal
from models.targets.quantization import FLOATS, PACKED, StoredMatrix
from models.targets.weights import tensor_files

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tables that a checkpoint may hold once more beside the layer (DeepSeek-V3); engines take the target's."""
OTHER = "choose another draft.method"


@dataclass(frozen=True)
class OwnLayer:
    """The tensors of one layer in a target's files."""

    folder: Path
    files: Mapping[str, str]
    """File of every floating-point tensor, by its name."""
    quantized: Mapping[str, StoredMatrix]
    """The other ones."""

    @classmethod
    def find(cls, target: Path, tensors: Mapping[str, Tensor]) -> "OwnLayer":
        """Where the target has `tensors`; no weights are read.

        Raises Refusal, naming a tensor, unless the layer has exactly these, with these shapes, in a format that can be
        read.
        """
        stored, prefix = tensor_files(target), _common_beginning(min(tensors), max(tensors))
        if not any(name.startswith(prefix) for name in stored):
            raise Refusal(f"{target} holds no MTP layer (no tensor named {prefix}*): {OTHER}")
        found = cls(target, files := {}, quantized := {})
        for name in sorted(tensors):
            kind = "" if name in stored else next((kind for kind in PACKED if _packed(name, kind) in stored), None)
            if kind is None:
                raise Refusal(
                    f"the MTP layer in {target} lacks {name}, so it is of another kind than draft says: {OTHER}"
                )
            if kind or not _is_float(target / stored[name], name):
                quantized[name] = StoredMatrix.find(target, stored, name.removesuffix(".weight"))
            else:
                files[name] = stored[name]
        known = {*tensors, *(prefix + copy for copy in COPIES)}
        known |= {f"{matrix.module}.{last}" for matrix in quantized.values() for last in matrix.files}
        if foreign := sorted(name for name in stored if name.startswith(prefix) and name not in known):
            raise Refusal(f"the MTP layer in {target} also has {foreign[0]}, which is not supported: {OTHER}")
        found._check_shapes(tensors)
        return found

    def _check_shapes(self, tensors: Mapping[str, Tensor]) -> None:
        """Of floats; a quantized matrix is checked where it is read."""
        for file, names in self._by_file().items():
            with safe_open(self.folder / file, framework="pt") as opened:
                for name in names:
                    _check_shape(self.folder, name, opened.get_slice(name).get_shape(), tensors[name])

    def _by_file(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, file in self.files.items():
            found.setdefault(file, []).append(name)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`; what is quantized is dequantized."""
        for file, names in self._by_file().items():
            with safe_open(self.folder / file, framework="pt") as opened:
                for name in names:
                    tensors[name].copy_(opened.get_tensor(name))
        for name, stored in self.quantized.items():
            matrix = stored.read(torch.float32)
            _check_shape(self.folder, name, matrix.shape, tensors[name])
            tensors[name].copy_(matrix)


def _packed(name: str, kind: str) -> str:
    return f"{name.removesuffix('weight')}{kind}"


def _is_float(file: Path, name: str) -> bool:
    with safe_open(file, framework="pt") as opened:
        return opened.get_slice(name).get_dtype() in FLOATS


def _check_shape(target: Path, name: str, found: "torch.Size | list[int]", wanted: Tensor) -> None:
    if tuple(found) != tuple(wanted.shape):
        raise Refusal(
            f"{name} in {target} is {list(found)}, and a layer with the draft's sizes has {list(wanted.shape)}"
        )


def _common_beginning(one: str, other: str) -> str:
    differing = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return one[: next(differing, min(len(one), len(other)))]
