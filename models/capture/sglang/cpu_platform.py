"""SGLang's platform plugin for machines without CUDA (entry point group `sglang.srt.platforms`).

SGLang's own CPU platform needs kernels that its CUDA wheels do not contain. The class has a module of its own: it
imports SGLang's platform modules, which SGLang itself must import first.
"""

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import torch

from infra.settings import sglang_platform

NAME = "draftsmith_cpu"
PLATFORM = "models.capture.sglang.cpu_platform_class.PlainCpu"


def activate() -> str | None:
    """Entry point: the platform's class; None with CUDA, and where SGLang computes on something else by itself.

    Users' servers find this plugin too: chosen for one with its own accelerator it would take that away, and beside
    another platform SGLang refuses to start.
    """
    if torch.cuda.is_available() or (sglang_platform() != NAME and _computes_elsewhere()):
        return None
    _declare_torchvision_operators()
    return PLATFORM


def _computes_elsewhere() -> bool:
    """Whether there is another accelerator, another platform's plugin, or SGLang's own kernels for CPUs."""
    others = [one for one in entry_points(group="sglang.srt.platforms") if not one.name.startswith("draftsmith_")]
    return bool(others) or torch.accelerator.is_available() or _has_kernels()


def _has_kernels() -> bool:
    if find_spec("sgl_kernel") is None:
        return False
    try:
        import sgl_kernel  # noqa: F401 # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError):  # one for GPUs, on a machine that has none
        return False
    return hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def _declare_torchvision_operators() -> None:
    """Most of torchvision's wheels link CUDA; without it its Python part imports if two operators have a schema.

    Where its library loads, it declares them itself: in an environment for GPUs on a machine that has none, or beside a
    build for CPUs. A second declaration ends the process.
    """
    global _library  # noqa: PLW0603 (the declarations live as long as the library object)
    if _library is None and not _torchvision_loads():
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _torchvision_loads() -> bool:
    found = find_spec("torchvision")
    for file in Path(found.origin).parent.glob("_C*.so") if found and found.origin else ():
        try:
            torch.ops.load_library(file)
        except OSError:
            continue
        return True
    return False


_library: torch.library.Library | None = None
