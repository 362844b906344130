"""Files of tensors, in the safetensors format."""

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous CPU tensors to `path`, with the mode that `open` gives; it is neither atomic nor durable.

    Raises SafetensorError where the disk is full.
    """
    # safetensors 0.8.0 writes to a file that nobody but its owner may read, and renames it.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(mode)
