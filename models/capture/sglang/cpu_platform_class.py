"""A plain CPU as an SGLang platform, with PyTorch's own kernels."""

from sglang.srt.platforms.cpu import CpuDeviceMixin  # pyright: ignore[reportMissingImports]
from sglang.srt.platforms.device_mixin import PlatformEnum  # pyright: ignore[reportMissingImports]
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform  # pyright: ignore[reportMissingImports]
from torch import device


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
