"""Attention for verification steps and for the draft's own steps, on PyTorch's kernels: chains and DFlash's blocks.

And attention sinks, as gpt-oss has them, which SGLang's own PyTorch attention does not take.
"""

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

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that pad a batch which other ranks want larger."""
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        verifies = batch.forward_mode.is_target_verify()
        if not verifies and sinks is None:
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache)
        if save_kv_cache and k is not None:
            place = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        if verifies:
            before, counts = batch.seq_lens.tolist(), [batch.spec_info.draft_token_num] * batch.batch_size
        else:
            before, counts = batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist()
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(counts)
        rows = enumerate(zip(queries, before, strict=True))
        return torch.cat([self._attend(part, layer, batch, row, length, sinks) for row, (part, length) in rows])

    def _attend(
        self, queries: Tensor, layer: Any, batch: Any, row: int, length: int, sinks: Tensor | None = None
    ) -> Tensor:
        """Rows of one request after `length` others: each sees those, and up to itself (of a block to fill: all)."""
        count = len(queries)
        places = self.req_to_token_pool.req_to_token[batch.req_pool_indices[row], : length + count]
        keys, values = self._cached(layer, places)
        own, other = torch.arange(count)[:, None] + length, torch.arange(length + count)[None, :]
        mask = other <= own
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            mask = torch.ones_like(mask)
        window = layer.sliding_window_size
        if window is not None and window > -1:
            mask &= other >= own - window
        heads = [one.transpose(0, 1)[None] for one in (queries, keys.to(queries.dtype), values.to(queries.dtype))]
        grouped = layer.tp_q_head_num != layer.tp_k_head_num
        out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=layer.scaling, enable_gqa=grouped)
        if sinks is not None:
            # A sink is one more key with this logit and no value: it only takes its share of the softmax.
            each = heads[1].repeat_interleave(layer.tp_q_head_num // layer.tp_k_head_num, dim=1)
            logits = (heads[0] @ each.mT * layer.scaling).masked_fill(~mask, -torch.inf)
            total = logits.float().logsumexp(-1, keepdim=True)
            out = (out * (total - sinks.float()[:, None, None]).sigmoid()).to(out.dtype)
        return out[0].transpose(0, 1).reshape(count, -1)

    def _cached(self, layer: Any, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a request; layers with a window may have a pool of their own."""
        pool = self.token_to_kv_pool
        if self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
            places = pool.translate_loc_from_full_to_swa(places)
        return pool.get_key_buffer(layer.layer_id)[places], pool.get_value_buffer(layer.layer_id)[places]

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if sinks is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
            queries = q.view(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
            rows = enumerate(zip(queries, batch.seq_lens.tolist(), strict=True))
            return torch.cat([self._attend(one, layer, batch, row, length - 1, sinks) for row, (one, length) in rows])
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
