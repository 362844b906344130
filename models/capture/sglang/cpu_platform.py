"""SGLang's platform plugin for machines without CUDA (entry point group `sglang.srt.platforms`).

SGLang's own CPU platform needs kernels that its CUDA wheels do not contain. The class has a module of its own: it
imports SGLang's platform modules, which SGLang itself must import first.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

PLATFORM = "models.capture.sglang.cpu_platform_class.PlainCpu"


def activate() -> str | None:
    """Entry point: the platform's class, or None with CUDA."""
    if torch.cuda.is_available():
        return None
    _declare_torchvision_operators()
    return PLATFORM


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
