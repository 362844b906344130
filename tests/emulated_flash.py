"""FlashAttention's operations as CUDA offers them, computed plainly on the CPU, for the emulated device."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, most_q: int, most_k: int, dropout: float,
    causal: bool, _debug: bool = False, *, return_debug_mask: bool = False, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`aten::_flash_attention_forward` over packed sequences `[N, heads, d]`: the output, the log-sums `[heads, N]`."""
    if {x.dtype for x in (q, k, v)} not in ({torch.float16}, {torch.bfloat16}):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q_ends.dtype != torch.int32 or k_ends.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    assert dropout == 0.0
    assert not return_debug_mask
    window = window_size_left, window_size_right
    assert most_q == max(q_ends.diff())
    assert most_k == max(k_ends.diff())
    outs, sums = [], []
    for _, _, _, keys_values, scores in _sequences(q, k, v, q_ends, k_ends, causal, window):
        outs.append((scores.softmax(-1) @ keys_values[1]).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    state = torch.zeros(2, dtype=torch.uint64)
    return torch.cat(outs).to(q.dtype), torch.cat(sums, dim=1), state, state[:0], q.new_empty(0)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, q_ends: Tensor, k_ends: Tensor,
    _most_q: int, _most_k: int, _dropout: float, causal: bool, *_random_state: Tensor,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`aten::_flash_attention_backward`: gradients of queries, keys and values."""
    if not (gradient.is_contiguous() and log_sum.is_contiguous()):
        raise RuntimeError("FlashAttention's gradients and log-sums must be contiguous")
    window = window_size_left, window_size_right
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for rows, seen, queries, (keys, values), scores in _sequences(q, k, v, q_ends, k_ends, causal, window):
        slope, result = (x[rows].float().transpose(0, 1) for x in (gradient, out))
        shares = (scores - log_sum[:, rows, None]).exp()
        of_scores = shares * (slope @ values.transpose(1, 2) - (slope * result).sum(-1, keepdim=True))
        of_scores *= q.shape[-1] ** -0.5
        of_q[rows] = (of_scores @ keys).transpose(0, 1)
        for whole, of_heads in ((of_k, of_scores.transpose(1, 2) @ queries), (of_v, shares.transpose(1, 2) @ slope)):
            whole[seen] = of_heads.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return of_q.to(q.dtype), of_k.to(q.dtype), of_v.to(q.dtype)


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, causal: bool, window: tuple[int | None, int | None]
) -> Iterator[tuple[slice, slice, Tensor, tuple[Tensor, Tensor], Tensor]]:
    """Of each sequence: its rows and keys; queries, keys, values and scores `[heads, ...]` in float32."""
    group = q.shape[1] // k.shape[1]
    for rows, seen in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        queries = q[slice(*rows)].float().transpose(0, 1)
        keys, values = (x[slice(*seen)].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = queries @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        # The diagonal is aligned at the end, as in FlashAttention 2.1 and later; a negative side of a window is open.
        left, right = (-1 if side is None else side for side in window)
        after = (
            torch.arange(scores.shape[2]) - torch.arange(scores.shape[1])[:, None] - scores.shape[2] + scores.shape[1]
        )
        hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
        if causal or right >= 0:
            hidden |= after > (0 if causal else right)
        if left >= 0:
            hidden |= after < -left
        scores = scores.masked_fill(hidden, float("-inf"))
        yield slice(*rows), slice(*seen), queries, (keys, values), scores
