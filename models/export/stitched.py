"""The target with a trained MTP layer in place of its own.

Only files with tensors of the layer are written again, in the data types that they had; all others are hard links to
the target's, or copies where links are not possible. Names, index and configuration stay: engines serve the folder as
they serve the target.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from infra.refusal import Refusal
from models.drafts.base import Draft
from models.targets.own_layer import OwnLayer
from models.targets.weights import tensor_files
from models.tensor_file import write_tensors

LEFT_OUT = (".cache", ".git")


def stitch(draft: Draft, target: Path, folder: Path) -> list[str]:
    """Write `target` with the draft's weights to `folder`, which must not be there. Returns the files written again.

    Raises Refusal for a draft that no target comes with, whose target is another one, or whose layer is quantized.
    """
    tensors = draft.target_tensors(tensor_files(target))
    if not tensors:
        raise Refusal(f"{draft.config.title} drafts are no part of their target's checkpoint: serve them beside it")
    if folder.exists():
        raise Refusal(f"{folder} is there already: give a new folder, or remove it")
    layer = OwnLayer.find(target, tensors)
    if layer.quantized:
        raise Refusal(
            f"the MTP layer in {target} is quantized, and this one is not: serve the export beside the target"
        )
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    written = sorted(set(layer.files.values()))
    for path in sorted(target.rglob("*")):
        place = path.relative_to(target)
        if path.is_file() and place.parts[0] not in LEFT_OUT:
            (aside / place).parent.mkdir(parents=True, exist_ok=True)
            if str(place) in written:
                _rewrite(path, tensors, aside / place)
            else:
                _link(path.resolve(), aside / place)
    aside.replace(folder)
    return written


def can_link(target: Path, folder: Path) -> bool:
    """Whether a folder beside `folder` can hold hard links to the target's files."""
    return (target / "config.json").resolve().stat().st_dev == folder.parent.stat().st_dev


def _rewrite(file: Path, changed: Mapping[str, Tensor], place: Path) -> None:
    """The file with these tensors in place of its own; data types and metadata stay."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    for name in tensors.keys() & changed.keys():
        tensors[name] = changed[name].to("cpu", tensors[name].dtype).contiguous()
    write_tensors(place, tensors, metadata)


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, place)
