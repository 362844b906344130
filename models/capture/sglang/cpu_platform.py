"""SGLang's platform plugin for machines without CUDA (entry point group `sglang.srt.platforms`).

SGLang's own CPU platform needs kernels that its CUDA wheels do not contain. The class has a module of its own: it
imports SGLang's platform modules, which SGLang itself must import first.
"""

import torch

PLATFORM = "models.capture.sglang.cpu_platform_class.PlainCpu"


def activate() -> str | None:
    """Entry point: the platform's class, or None with CUDA."""
    if torch.cuda.is_available():
        return None
    _declare_torchvision_operators()
    return PLATFORM


def _declare_torchvision_operators() -> None:
    """torchvision's wheels link CUDA; its Python part imports without CUDA if two operators have a schema."""
    global _library  # noqa: PLW0603 (the declarations live as long as the library object)
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library: torch.library.Library | None = None
