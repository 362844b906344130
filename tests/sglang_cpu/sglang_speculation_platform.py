"""The plain CPU platform with SGLang's own seams for speculation filled in."""

from typing import Any

import torch
from torch import Tensor

from models.capture.sglang.cpu_platform_class import PlainCpu


class SpeculatingCpu(PlainCpu):
    """Chains on PyTorch's attention."""

    def supports_speculative_algorithm(self, _algorithm: Any) -> bool:
        return True

    def get_default_speculative_draft_attention_backend(self, _algorithm: Any) -> str:
        return "torch_native"

    def supports_speculative_draft_attention_backend(self, _algorithm: Any, backend: str) -> bool:
        return backend == "torch_native"

    def get_speculative_cache_locs_fn(self) -> Any:
        return cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> Any:
        if kind != "mha":
            return None
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        class CpuPool(MHATokenToKVPool):
            def _init_kv_copy_and_warmup(self) -> None:
                """The stock one launches a Triton kernel."""
                self._kv_copy_config = None
                self.use_native_move_kv_cache = True

        return CpuPool

    def init_backend(self) -> None:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang_speculation_attention import VerifyingAttention

        register_attention_backend("torch_native")(VerifyingAttention)
        from sglang.srt.layers import dp_attention
        from sglang.srt.model_executor import forward_batch_info

        # For SGLang's own CPU platform alone: no pinned memory, and no Triton.
        forward_batch_info._is_cpu = True
        dp_attention.memcpy_func = dp_attention.memcpy_cpu


def cache_locs(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **_: Any
) -> Tensor:
    """Places in the KV cache from start to end of each request, side by side."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in rows]).long()
