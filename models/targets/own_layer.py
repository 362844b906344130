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


def own_files(target: Path, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """File name of each of these tensors in the target's folder; no weights are read.

    Raises Refusal, naming a tensor, unless the layer has exactly these, as floating-point numbers.
    """
    files, prefix = tensor_files(target), _common_beginning(min(shapes), max(shapes))
    if not any(name.startswith(prefix) for name in files):
        raise Refusal(f"{target} holds no MTP layer (no tensor named {prefix}*): {OTHER}")
    for name, shape in shapes.items():
        if name not in files:
            raise Refusal(f"the MTP layer in {target} lacks {name}, so it is of another kind than draft says: {OTHER}")
        with safe_open(target / files[name], framework="pt") as opened:
            stored = opened.get_slice(name)
            found, dtype = torch.Size(stored.get_shape()), stored.get_dtype()
        if dtype not in FLOATS:
            raise Refusal(f"the MTP layer in {target} is quantized ({name} is {dtype}), and cannot be trained: {OTHER}")
        if found != shape:
            raise Refusal(f"{name} in {target} is {list(found)}, and a layer with the draft's sizes has {list(shape)}")
    known = {*shapes, *(prefix + copy for copy in COPIES)}
    if foreign := sorted(name for name in files if name.startswith(prefix) and name not in known):
        raise Refusal(f"the MTP layer in {target} also has {foreign[0]}, which is not supported: {OTHER}")
    return {name: files[name] for name in shapes}


def _common_beginning(one: str, other: str) -> str:
    differing = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return one[: next(differing, min(len(one), len(other)))]


def read_own(target: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """These tensors of the target in float32. Raises Refusal: see `own_files`."""
    files, found = own_files(target, shapes), dict[str, Tensor]()
    for file in sorted(set(files.values())):
        with safe_open(target / file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name).float() for name, place in files.items() if place == file}
    return found
