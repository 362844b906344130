"""Kernels of EAGLE-3's attention: they give the log-sum-exp of their scores too, and take it back in the backward pass.

Plain torch is the specification; FlashAttention for CPUs and for CUDA.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from models.drafts.transfer import to_device

PLAIN_ROWS = 512
"""Query rows of the plain kernel whose scores are alive at once; with a window, those that share a mask."""


class Attended(NamedTuple):
    """An attention's inputs and results; results may be merged with those of other keys."""

    q: Tensor
    """`[N, heads, d]`; scores are scaled by `d ** -0.5`."""
    k: Tensor
    """`[M, kv_heads, d]`."""
    v: Tensor
    """`[M, kv_heads, d]`."""
    out: Tensor
    """`[N, heads, d]` attended values."""
    log_sum: Tensor
    """`[N, heads]` log-sum-exp of the scores, at least float32."""
    lengths: Sequence[int] | None
    """Causal within packed sequences of these lengths, M being N; None: all keys precede all queries."""
    window: int | None
    """Rows that a query sees, back from its own: of its sequence, or of the keys that precede the queries, its own and
    earlier queries counted too. None: all."""


class Kernel(Protocol):
    """Attention of packed sequences, and its backward pass from a given log-sum-exp."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """`out` and `log_sum` (see `Attended`); every query sees a key."""
        ...

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v where probabilities are `exp(score - log_sum)` and `out` is what all columns gave."""
        ...


class PlainKernel(Kernel):
    """The specification, in plain torch and float32 (float64 stays): query rows in chunks, sample by sample."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None, window: int | None
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=dtype)
        for view in _views(lengths, len(q), len(k), window):
            scores = _masked_scores(q, k, view)
            found = scores.logsumexp(-1)
            attended = (scores - found.unsqueeze(-1)).exp_() @ _heads(v, view.keys, q.shape[1])
            out[view.rows], log_sum[view.rows] = attended.transpose(0, 1).to(out.dtype), found.T
        return out, log_sum

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum, lengths, window = of
        heads, kv_heads, scale = q.shape[1], k.shape[1], q.shape[-1] ** -0.5
        of_q, of_k, of_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=log_sum.dtype) for x in (k, v))
        for view in _views(lengths, len(q), len(k), window):
            rows, keys = view.rows, view.keys
            slope = gradient[rows].transpose(0, 1).to(log_sum.dtype)
            shares = (_masked_scores(q, k, view) - log_sum[rows].T.unsqueeze(-1)).exp_()
            drop = (slope * out[rows].transpose(0, 1)).sum(-1, keepdim=True)
            of_scores = (slope @ _heads(v, keys, heads).transpose(1, 2) - drop).mul_(shares).mul_(scale)
            of_q[rows] = (of_scores @ _heads(k, keys, heads)).transpose(0, 1).to(q.dtype)
            for found, of_head in (
                (of_k, of_scores.transpose(1, 2) @ q[rows].transpose(0, 1).to(log_sum.dtype)),
                (of_v, shares.transpose(1, 2) @ slope),
            ):
                found[keys] += of_head.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


class _View(NamedTuple):
    """At most `PLAIN_ROWS` query rows, and the keys that any of them sees."""

    rows: slice
    keys: slice
    offset: int
    """Row r stands where key r + offset does."""
    window: int | None

    def unseen(self, device: torch.device) -> Tensor | None:
        """`[rows, keys]` bool: what a row does not see; None if every row sees all."""
        if self.window is None and self.offset >= self.keys.stop:
            return None
        own = torch.arange(self.rows.start, self.rows.stop, device=device).unsqueeze(1) + self.offset
        other = torch.arange(self.keys.start, self.keys.stop, device=device)
        unseen = other > own
        return unseen if self.window is None else unseen | (other <= own - self.window)


def sequence_ends(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _views(lengths: Sequence[int] | None, queries: int, keys: int, window: int | None) -> list[_View]:
    offset, whole = (keys, [(0, queries)]) if lengths is None else (0, list(pairwise(sequence_ends(lengths))))
    found = []
    for start, end in whole:
        for row in range(start, end, PLAIN_ROWS):
            stop = min(row + PLAIN_ROWS, end)
            first = start if window is None else max(start, row + offset - window + 1)
            found.append(_View(slice(row, stop), slice(first, min(stop + offset, keys)), offset, window))
    return found


def _heads(x: Tensor, rows: slice, heads: int) -> Tensor:
    """Keys or values as `[heads, rows, d]`, at least float32."""
    wide = x[rows].transpose(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    return wide.repeat_interleave(heads // x.shape[1], dim=0)


def _masked_scores(q: Tensor, k: Tensor, view: _View) -> Tensor:
    keys, unseen = _heads(k, view.keys, q.shape[1]), view.unseen(q.device)
    scores = q[view.rows].transpose(0, 1).to(keys.dtype) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
    return scores if unseen is None else scores.masked_fill_(unseen, float("-inf"))


class CpuFlash(Kernel):
    """PyTorch's flash attention for CPUs, sample by sample. Key-value heads are its batch: none is repeated."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None, window: int | None
    ) -> tuple[Tensor, Tensor]:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys, causal, mask in _sequences(q, k, lengths, window):
            found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_by_group(q.shape[1], q[rows], k[keys], v[keys]), 0.0, causal, attn_mask=mask
            )
            out[rows], log_sum[rows] = _ungrouped(found), _ungrouped(sums.unsqueeze(-1)).squeeze(-1)
        return out, log_sum

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum, lengths, window = of
        heads, gradients = q.shape[1], (torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v))
        for rows, keys, causal, mask in _sequences(q, k, lengths, window):
            mine = (gradient[rows], q[rows], k[keys], v[keys], out[rows])
            slope, *parts, result = _by_group(heads, *mine, kv_heads=k.shape[1])
            sums = log_sum[rows].T.unflatten(0, (k.shape[1], -1)).contiguous()
            of_parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                slope, *parts, result, sums, 0.0, causal, attn_mask=mask
            )
            for whole, place, part in zip(gradients, (rows, keys, keys), of_parts, strict=True):
                # [kv_heads, group, n, d]; a key-value head gathers what its group gives.
                summed = part if whole.shape[1] == heads else part.sum(1, keepdim=True)
                # Through a window, keys are seen by rows of several views.
                if whole is gradients[0] or window is None:
                    whole[place] = _ungrouped(summed)
                else:
                    whole[place] += _ungrouped(summed)
        return gradients


def _sequences(
    q: Tensor, k: Tensor, lengths: Sequence[int] | None, window: int | None
) -> list[tuple[slice, slice, bool, Tensor | None]]:
    """(queries, keys, causal, what is added to their scores `[queries, keys]`) of each sequence, or part of one."""
    if window is not None:
        views = _views(lengths, len(q), len(k), window)
        return [(view.rows, view.keys, False, _added(q, view)) for view in views]
    if lengths is None:
        return [(slice(None), slice(None), False, None)]
    return [(slice(*bounds), slice(*bounds), True, None) for bounds in pairwise(sequence_ends(lengths))]


def _added(q: Tensor, view: _View) -> Tensor:
    unseen = view.unseen(q.device)
    assert unseen is not None
    return torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, float("-inf"))


def _by_group(heads: int, *tensors: Tensor, kv_heads: int | None = None) -> list[Tensor]:
    """`[n, heads or kv_heads, d]` each as `[kv_heads, heads / kv_heads, n, d]` views."""
    kv_heads = kv_heads or min(x.shape[1] for x in tensors)
    views = (x.transpose(0, 1).unflatten(0, (kv_heads, -1)) for x in tensors)
    return [view.expand(-1, heads // kv_heads, -1, -1) for view in views]


def _ungrouped(x: Tensor) -> Tensor:
    """`[kv_heads, group, n, d]` as `[n, kv_heads * group, d]`."""
    return x.flatten(0, 1).transpose(0, 1)


class CudaFlash(Kernel):
    """FlashAttention on CUDA in half precision: all samples in one launch. (Never run so far: no GPU.)"""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None, window: int | None
    ) -> tuple[Tensor, Tensor]:
        if not len(q):
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_bounds(q, k, lengths), 0.0, lengths is not None, return_debug_mask=False,
            **_left_of(q, lengths, window),
        )  # fmt: skip
        return out, sums.T

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum, lengths, window = of
        if not len(q):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # There is no dropout, whose random state this would be.
        state = torch.zeros(2, dtype=torch.uint64, device=gradient.device)
        unused = torch.empty(0, dtype=torch.uint64, device=gradient.device)
        return torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q, k, v, out, log_sum.T.contiguous(), *_bounds(q, k, lengths), 0.0,
            lengths is not None, state, unused, **_left_of(q, lengths, window),
        )  # fmt: skip


def _left_of(q: Tensor, lengths: Sequence[int] | None, window: int | None) -> dict[str, int]:
    """The kernel's window: keys to the left of the diagonal, which ends at the last query and the last key.

    Where all keys precede the queries, that diagonal is as many rows further left as there are queries.
    """
    if window is None:
        return {}
    after, right = (0, 0) if lengths is not None else (len(q), -1)
    return {"window_size_left": window - 1 - after, "window_size_right": right}


def _bounds(q: Tensor, k: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor, int, int]:
    """Ends of the sequences of queries and of keys, and their maximum lengths."""
    of_both = ((len(q),), (len(k),)) if lengths is None else (tuple(lengths),) * 2
    ends = (_ends_on(of_one, q.device) for of_one in of_both)
    return (*ends, *(max(of_one, default=0) for of_one in of_both))  # type: ignore[return-value]


@lru_cache(maxsize=32)
def _ends_on(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once for all steps of a micro-batch, forward and backward."""
    return to_device([torch.tensor(sequence_ends(lengths), dtype=torch.int32)], device)[0]


def fastest_kernel(q: Tensor) -> Kernel:
    """FlashAttention where it can run: on CUDA in half precision only, from compute capability 8.0."""
    if q.device.type == "cpu":
        return CpuFlash()
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    old = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0)
    return CudaFlash() if fits and not old else PlainKernel()
