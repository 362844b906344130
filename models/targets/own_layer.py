"""Weights of a draft that are tensors of the target's own checkpoint: its MTP layer."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from infra.refusal import Refusal
from models.targets.weights import tensor_files

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tables that a checkpoint may hold once more beside the layer (DeepSeek-V3); engines take the target's."""
FLOATS = ("F32", "F16", "BF16")
OTHER = "choose another draft.method"


def own_files(target: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """File name of each of these tensors in the target's folder; no weights are read.

    Raises Refusal, naming a tensor, unless the layer has exactly these, with these shapes, as floating-point numbers.
    """
    if not tensors:
        return {}
    files, prefix = tensor_files(target), _common_beginning(min(tensors), max(tensors))
    if not any(name.startswith(prefix) for name in files):
        raise Refusal(f"{target} holds no MTP layer (no tensor named {prefix}*): {OTHER}")
    if lacking := sorted(tensors.keys() - files.keys()):
        raise Refusal(
            f"the MTP layer in {target} lacks {lacking[0]}, so it is of another kind than draft says: {OTHER}"
        )
    for file, names in _by_file(tensors, files).items():
        with safe_open(target / file, framework="pt") as opened:
            for name in names:
                stored, wanted = opened.get_slice(name), tensors[name].shape
                found, dtype = torch.Size(stored.get_shape()), stored.get_dtype()
                if dtype not in FLOATS:
                    raise Refusal(
                        f"the MTP layer in {target} is quantized ({name} is {dtype}), and cannot be trained: {OTHER}"
                    )
                if found != wanted:
                    raise Refusal(
                        f"{name} in {target} is {list(found)}, and a layer with the draft's sizes has {list(wanted)}"
                    )
    known = {*tensors, *(prefix + copy for copy in COPIES)}
    if foreign := sorted(name for name in files if name.startswith(prefix) and name not in known):
        raise Refusal(f"the MTP layer in {target} also has {foreign[0]}, which is not supported: {OTHER}")
    return {name: files[name] for name in tensors}


def _by_file(tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in tensors:
        found.setdefault(files[name], []).append(name)
    return found


def _common_beginning(one: str, other: str) -> str:
    differing = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return one[: next(differing, min(len(one), len(other)))]


@torch.no_grad()
def load_own(target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill these tensors with the target's. Raises Refusal: see `own_files`."""
    for file, names in _by_file(tensors, own_files(target, tensors)).items():
        with safe_open(target / file, framework="pt") as opened:
            for name in names:
                tensors[name].copy_(opened.get_tensor(name))
