"""Attention for verification steps and for the draft's own steps, on PyTorch's kernels: chains and DFlash's blocks."""

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class VerifyingAttention(TorchNativeAttnBackend):
    """SGLang's own, and on top of it several proposals per request behind what the cache holds."""

    step: int | None = None
    """Of the draft's steps, from 0; None: not one of them."""

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.max_context_len = runner.model_config.context_len

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> Tensor:
        if not batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache)
        if save_kv_cache and k is not None:
            place = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        count = batch.spec_info.draft_token_num
        queries = q.view(batch.batch_size, count, layer.tp_q_head_num, layer.qk_head_dim)
        outputs = [self._verify(queries[row], layer, batch, row, count) for row in range(batch.batch_size)]
        return torch.cat(outputs)

    def _verify(self, queries: Tensor, layer: Any, batch: Any, row: int, count: int) -> Tensor:
        """`count` rows of one request: each sees the prefix, and the rows up to itself (of a block to fill: all)."""
        length = int(batch.seq_lens[row])
        places = self.req_to_token_pool.req_to_token[batch.req_pool_indices[row], : length + count]
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[places]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[places]
        own, other = torch.arange(count)[:, None] + length, torch.arange(length + count)[None, :]
        mask = other <= own
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            mask = torch.ones_like(mask)
        window = layer.sliding_window_size
        if window is not None and window > -1:
            mask &= other >= own - window
        heads = (queries, keys.to(queries.dtype), values.to(queries.dtype))
        out = scaled_dot_product_attention(
            *(one.transpose(0, 1)[None] for one in heads),
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        return out[0].transpose(0, 1).reshape(count, -1)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> Tensor:
        if self.step is None:
            return super().forward_decode(q, k, v, layer, batch, save_kv_cache)
        kept = batch.seq_lens
        batch.seq_lens = kept + self.step + 1
        try:
            return super().forward_decode(q, k, v, layer, batch, save_kv_cache)
        finally:
            batch.seq_lens = kept


class DraftSteps:
    """One backend per step of the draft's chain."""

    def __init__(self, runner: Any, topk: int, steps: int):
        assert topk == 1, "chains only"
        self.attn_backends = [named(VerifyingAttention(runner)) for _ in range(steps - 1)]
        for step, backend in enumerate(self.attn_backends):
            backend.step = step
        named(self)

    def init_forward_metadata(self, batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(batch)


def named(backend: Any) -> Any:
    """With the names that SGLang asks every backend for."""
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend
