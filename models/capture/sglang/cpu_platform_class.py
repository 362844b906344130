"""A plain CPU as an SGLang platform, with PyTorch's own kernels."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin  # pyright: ignore[reportMissingImports]
from sglang.srt.platforms.device_mixin import PlatformEnum  # pyright: ignore[reportMissingImports]
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform  # pyright: ignore[reportMissingImports]
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]
from torch import device

BIND_THREADS = "sglang.srt.distributed.bootstrap._init_cpu_threads_env"


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    """No Triton, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, _device: device | None = None) -> bool:
        return False


def bind_threads_with_kernels(original: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Hook around the binding of threads, which SGLang's own kernels do.

    SGLang 0.5.23 asks for them on every ARM processor by its name, also where they are not installed.
    """
    if hasattr(torch.ops.sgl_kernel, "init_cpu_threads_env"):
        original(*arguments, **named)


# SGLang imports this module before it applies the hooks of its plugins.
HookRegistry.register(BIND_THREADS, bind_threads_with_kernels, HookType.AROUND)
