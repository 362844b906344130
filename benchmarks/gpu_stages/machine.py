"""The machine: what `draftsmith doctor` says, and whether torch computes on the GPU."""

import torch
from torch.cuda import nccl

from gpu_stages.base import Bench
from infra.doctor.checks import examine
from infra.doctor.cuda import BFLOAT16
from infra.refusal import Refusal
from models.devices import compute_device


def doctor(bench: Bench) -> None:
    """Raises Refusal where torch cannot compute on a GPU, with doctor's findings about it."""
    findings = examine()
    bench.note(doctor={one.name: {"verdict": one.verdict, "found": one.found} for one in findings})
    if not bench.is_gpu:
        return
    if not torch.cuda.is_available():
        about = "; ".join(one.found for one in findings if one.name in ("GPUs", "torch build"))
        raise Refusal(
            f"torch {torch.__version__} finds no GPU that it can use. Doctor: {about}. Install NVIDIA's driver and a "
            "torch for CUDA (`draftsmith doctor` names both), and give the container its GPUs"
        )
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    total = (torch.ones(1000, device=compute_device()) * 2).sum().item()
    bench.note(
        device=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl.version())),
        devices=torch.cuda.device_count(),
    )
    if total != 2000 or capability < BFLOAT16:
        raise Refusal(
            f"{properties.name} has compute capability {properties.major}.{properties.minor} and adds 1000 twos to "
            f"{total:g}: the stages compute in bfloat16, from {BFLOAT16[0]}.{BFLOAT16[1]} on, so take another GPU"
        )
