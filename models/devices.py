"""The device that a process of the data plane computes on."""

import torch

from infra.planner.memory import RESERVED
from infra.pools.gpus import read_gpus
from infra.refusal import Refusal
from infra.settings import leased_gpus


def compute_device() -> torch.device:
    """The first GPU of this process's lease, or the CPU where none was leased.

    Raises Refusal for leased GPUs that torch cannot use: on the CPU the process would go on a hundred times slower.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if gpus := leased_gpus():
        raise Refusal(
            f"this process was given the GPUs {', '.join(gpus)} ($CUDA_VISIBLE_DEVICES), and torch {torch.__version__} "
            "cannot use them: install a torch for CUDA and this driver (`draftsmith doctor` names the driver), or "
            "lease no GPUs (pools.inference_gpus=0 pools.training_gpus=0)"
        )
    return torch.device("cpu")


def device_with(nbytes: int) -> torch.device:
    """The device to compute on if `nbytes` of its memory are free, else the CPU."""
    device = compute_device()
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < nbytes:
        return torch.device("cpu")
    return device


def leased_bytes() -> list[int]:
    """Memory of each GPU of this process, in bytes; the smallest of the machine's where a name is not NVML's.

    Raises Refusal where the driver does not answer.
    """
    names = leased_gpus()
    inventory = read_gpus() if names else None
    if inventory is None:
        return [0] * len(names)
    known = {gpu.uuid: gpu.total for gpu in inventory.devices}
    return [known.get(name, min(known.values())) for name in names]


def limit_memory(nbytes: int | None) -> None:
    """Let this process take at most `nbytes` of its GPU, CUDA's own memory included; None: all of it.

    Beyond that torch raises OutOfMemoryError, so that the other process on the GPU keeps its part.
    """
    device = compute_device()
    if nbytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, nbytes - RESERVED) / total), device)
