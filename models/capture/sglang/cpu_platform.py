"""Whether this machine's SGLang runs on a plain CPU. Loaded by SGLang through the group `sglang.srt.platforms`.

SGLang's own CPU platform needs kernels that its CUDA wheels do not carry. Where CUDA exists this one steps aside.
"""

import torch

PLATFORM = "models.capture.sglang.cpu_platform_class.PlainCpu"


def activate() -> str | None:
    """Entry point: the platform's class, or None where there is CUDA."""
    if torch.cuda.is_available():
        return None
    _declare_torchvision_operators()
    return PLATFORM


def _declare_torchvision_operators() -> None:
    """torchvision's wheels link CUDA; its Python part imports without it once two operators have a schema."""
    global _library  # noqa: PLW0603 (the declarations live as long as the library object)
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library: torch.library.Library | None = None
