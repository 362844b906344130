"""Small tensors from the host to the device, without the host waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes; every dtype may begin there."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors on `device`, by one copy.

    From pageable memory CUDA copies only after all work before is done, and the host waits for it; from pinned memory
    the copy is queued. The allocator keeps the pinned memory until the copy is done.
    """
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        part[: tensor.nbytes] = tensor.flatten().view(torch.uint8)
    parts = packed.to(device, non_blocking=True).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]
