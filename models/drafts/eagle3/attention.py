"""EAGLE-3's attention over a packed batch in the training-time test, linear in tokens.

In the first step every row attends to its own sample's rows up to itself. In step j it attends to the first step's
keys as before, and to its own row's keys of steps 1..j: one column per step. Neither mask nor scores of tokens x tokens
are ever made: causal attention is a kernel that also gives the log-sum-exp of its scores, and the further columns are
merged into its result by it. The backward pass hands the kernel's own backward the merged result and the merged
log-sum-exp, with which it finds the merged probabilities (as ring attention does, arXiv 2310.01889). In the same way a
rank that has a part of a sample's rows merges what they find in the rows before them, which other ranks have too.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from models.drafts.transfer import to_device
from models.fused import compiles, fused

ROWS = 256
"""Rows whose further columns are worked on at once, in float32, where that takes memory: what stays in a cache."""

PLAIN_ROWS = 512
"""Query rows of the plain kernel whose scores are alive at once."""


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
    """Causal within packed sequences of these lengths, M being N; None: every query sees all keys."""


class Kernel(Protocol):
    """Attention of packed sequences, and its backward pass from a given log-sum-exp."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """`out` and `log_sum` (see `Attended`)."""
        ...

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v where probabilities are `exp(score - log_sum)` and `out` is what all columns gave."""
        ...


class Earlier(NamedTuple):
    """What sequences that begin in the middle of a sample see of its earlier part."""

    k: Tensor
    """`[M, kv_heads, d]` the first step's rotated keys, of all samples."""
    v: Tensor
    """`[M, kv_heads, d]`."""
    seen: tuple[slice, ...]
    """Earlier sequences that each sequence sees; empty at the beginning of a sample."""


def step_attention(
    q: Tensor,
    columns: Sequence[tuple[Tensor, Tensor]],
    lengths: Sequence[int],
    kernel: Kernel | None = None,
    earlier: Earlier | None = None,
) -> Tensor:
    """Attention of one step of the training-time test.

    Args:
        q: `[N, heads, d]` the step's rotated queries.
        columns: keys and values `[N, kv_heads, d]` of every step so far: the first step's are attended to causally,
            those of later steps row by row.
        lengths: rows of each packed sequence, summing to N.
        kernel: which attention; None: the fastest that these tensors allow.
        earlier: where sequences are parts of samples, what comes before them.

    Returns:
        `[N, heads * d]`.
    """
    with torch.autocast(q.device.type, enabled=False):
        k, v, seen = earlier or (q[:0], q[:0], ())
        how = _AttentionSettings(kernel or fastest_kernel(q), tuple(lengths), seen)
        out = _StepAttention.apply(how, q, k, v, *(x for column in columns for x in column))
    return out.flatten(1)  # type: ignore[union-attr]


def fastest_kernel(q: Tensor) -> Kernel:
    """FlashAttention where it can run; on CUDA in float32 it cannot, so the plain kernel is used."""
    if q.device.type == "cpu":
        return CpuFlash()
    return CudaFlash() if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 else PlainKernel()


class _AttentionSettings(NamedTuple):
    kernel: Kernel
    lengths: tuple[int, ...]
    seen: tuple[slice, ...]


class _StepAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _AttentionSettings, *tensors: Tensor) -> Tensor:
        q, earlier_k, earlier_v, k, v, *own = tensors
        out, log_sum = how.kernel.forward(q, k, v, how.lengths)
        for rows, keys in _looking_back(how):
            _join(out[rows], log_sum[rows], *how.kernel.forward(q[rows], earlier_k[keys], earlier_v[keys], None))
        if own:
            out, log_sum = _merge(q, own, out, log_sum)
        ctx.how = how
        ctx.save_for_backward(out, log_sum, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, log_sum, q, earlier_k, earlier_v, k, v, *own = ctx.saved_tensors
        kernel, gradient = ctx.how.kernel, gradients[0]
        of_q, of_k, of_v = kernel.backward(gradient, Attended(q, k, v, out, log_sum, ctx.how.lengths))
        of_earlier = torch.zeros_like(earlier_k), torch.zeros_like(earlier_v)
        for rows, keys in _looking_back(ctx.how):
            part_of = Attended(q[rows], earlier_k[keys], earlier_v[keys], out[rows], log_sum[rows], None)
            found = kernel.backward(gradient[rows], part_of)
            for whole, place, part in zip((of_q, *of_earlier), (rows, keys, keys), found, strict=True):
                whole[place] += part
        of_own = _add_own_gradients(of_q, gradient, q, own, out, log_sum) if own else []
        return (None, of_q, *of_earlier, of_k, of_v, *of_own)


def _looking_back(how: _AttentionSettings) -> list[tuple[slice, slice]]:
    """(rows, earlier rows that they see) of the sequences that see any."""
    rows = (slice(*bounds) for bounds in pairwise(_ends(how.lengths)))
    return [(mine, keys) for mine, keys in zip(rows, how.seen, strict=False) if keys.start < keys.stop]


def _join(out: Tensor, log_sum: Tensor, more: Tensor, more_sum: Tensor) -> None:
    """Attended values and log-sum-exp as of both sets of keys, in place of the first set's."""
    for rows in _row_blocks(out):
        total = torch.logaddexp(log_sum[rows], more_sum[rows])
        shares = [(x[rows] - total).exp_().unsqueeze(-1) for x in (log_sum, more_sum)]
        out[rows] = out[rows] * shares[0] + more[rows] * shares[1]
        log_sum[rows] = total


def _grouped(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """`[n, heads, ...]` as `[n, kv_heads, heads / kv_heads, ...]` in `dtype`."""
    return x.unflatten(1, (kv_heads, -1)).to(dtype)


def _row_blocks(x: Tensor) -> list[slice]:
    """All rows at once where fused functions are compiled, which have no float32 temporaries."""
    at_once = max(1, len(x)) if compiles(x.device) else ROWS
    return [slice(start, start + at_once) for start in range(0, len(x), at_once)]


def _merge(q: Tensor, own: Sequence[Tensor], out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the own columns `k1, v1, k2, v2 ..` into the kernel's values and log-sum-exp."""
    merged, total = torch.empty_like(out), torch.empty_like(log_sum)
    for rows in _row_blocks(q):
        _merge_rows(q[rows], out[rows], log_sum[rows], merged[rows], total[rows], *(x[rows] for x in own))
    return merged, total


@fused
def _merge_rows(q: Tensor, out: Tensor, log_sum: Tensor, merged: Tensor, total: Tensor, *own: Tensor) -> None:
    """Writes to `merged` and `total`."""
    kv_heads, dtype = own[0].shape[1], log_sum.dtype
    q = _grouped(q, kv_heads, dtype)
    scores = torch.stack([_grouped(log_sum, kv_heads, dtype), *(_scores(q, k) for k in own[::2])], dim=-1)
    after = scores.logsumexp(-1)
    shares = (scores - after.unsqueeze(-1)).exp_()
    found = _grouped(out, kv_heads, dtype) * shares[..., :1]
    for index, v in enumerate(own[1::2], 1):
        found.addcmul_(shares[..., index : index + 1], v.unsqueeze(2).to(dtype))
    merged.copy_(found.flatten(1, 2))
    total.copy_(after.flatten(1))


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """`[n, kv_heads, group]` scores of every row with its own key `[n, kv_heads, d]`."""
    return (q * k.unsqueeze(2)).sum(-1) * q.shape[-1] ** -0.5


def _add_own_gradients(
    of_q: Tensor, gradient: Tensor, q: Tensor, own: Sequence[Tensor], out: Tensor, log_sum: Tensor
) -> list[Tensor]:
    """Gradients of the own columns; what they give to the queries is added to `of_q`."""
    found = [torch.empty_like(x) for x in own]
    for rows in _row_blocks(q):
        given = (x[rows] for x in (of_q, gradient, q, out, log_sum))
        _add_own_gradients_of_rows(*given, *(x[rows] for x in found), *(x[rows] for x in own))
    return found


@fused
def _add_own_gradients_of_rows(
    of_q: Tensor, gradient: Tensor, q: Tensor, out: Tensor, log_sum: Tensor, *columns: Tensor
) -> None:
    """Adds to `of_q`, and writes to the first half of `columns` the gradients of the second half."""
    found, own = columns[: len(columns) // 2], columns[len(columns) // 2 :]
    kv_heads, dtype, scale = own[0].shape[1], log_sum.dtype, q.shape[-1] ** -0.5
    q, gradient, out, sums = (_grouped(x, kv_heads, dtype) for x in (q, gradient, out, log_sum))
    drop = (gradient * out).sum(-1)
    more = torch.zeros_like(q)
    for index in range(0, len(own), 2):
        k, v = own[index], own[index + 1]
        share = (_scores(q, k) - sums).exp_()
        slope = (((gradient * v.unsqueeze(2)).sum(-1) - drop) * share).mul_(scale).unsqueeze(-1)
        more.addcmul_(slope, k.unsqueeze(2).to(dtype))
        found[index].copy_((slope * q).sum(2))
        found[index + 1].copy_((share.unsqueeze(-1) * gradient).sum(2))
    of_q.add_(more.flatten(1, 2))


def _ends(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


class PlainKernel(Kernel):
    """The specification, in plain torch and float32 (float64 stays): query rows in chunks, sample by sample."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=dtype)
        for rows, seen in _chunks(lengths, len(q), len(k)):
            scores = _masked_scores(q, k, rows, seen, lengths is not None)
            found = scores.logsumexp(-1)
            attended = (scores - found.unsqueeze(-1)).exp_() @ _heads(v, seen, q.shape[1])
            out[rows], log_sum[rows] = attended.transpose(0, 1).to(out.dtype), found.T
        return out, log_sum

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum, lengths = of
        heads, kv_heads, scale = q.shape[1], k.shape[1], q.shape[-1] ** -0.5
        of_q, of_k, of_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=log_sum.dtype) for x in (k, v))
        for rows, seen in _chunks(lengths, len(q), len(k)):
            slope = gradient[rows].transpose(0, 1).to(log_sum.dtype)
            shares = (_masked_scores(q, k, rows, seen, lengths is not None) - log_sum[rows].T.unsqueeze(-1)).exp_()
            drop = (slope * out[rows].transpose(0, 1)).sum(-1, keepdim=True)
            of_scores = (slope @ _heads(v, seen, heads).transpose(1, 2) - drop).mul_(shares).mul_(scale)
            of_q[rows] = (of_scores @ _heads(k, seen, heads)).transpose(0, 1).to(q.dtype)
            for found, of_head in (
                (of_k, of_scores.transpose(1, 2) @ q[rows].transpose(0, 1).to(log_sum.dtype)),
                (of_v, shares.transpose(1, 2) @ slope),
            ):
                found[seen] += of_head.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _chunks(lengths: Sequence[int] | None, queries: int, keys: int) -> list[tuple[slice, slice]]:
    """(query rows, rows that they may see), at most `PLAIN_ROWS` queries at once."""
    if lengths is None:
        return [(slice(row, min(row + PLAIN_ROWS, queries)), slice(keys)) for row in range(0, queries, PLAIN_ROWS)]
    return [
        (slice(row, min(row + PLAIN_ROWS, end)), slice(start, min(row + PLAIN_ROWS, end)))
        for start, end in pairwise(_ends(lengths))
        for row in range(start, end, PLAIN_ROWS)
    ]


def _heads(x: Tensor, rows: slice, heads: int) -> Tensor:
    """Keys or values as `[heads, rows, d]`, at least float32."""
    wide = x[rows].transpose(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    return wide.repeat_interleave(heads // x.shape[1], dim=0)


def _masked_scores(q: Tensor, k: Tensor, rows: slice, seen: slice, causal: bool) -> Tensor:
    keys = _heads(k, seen, q.shape[1])
    scores = q[rows].transpose(0, 1).to(keys.dtype) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    count, width = scores.shape[1:]
    future = torch.ones(count, width, dtype=torch.bool, device=q.device).triu(1 + width - count)
    return scores.masked_fill_(future, float("-inf"))


class CpuFlash(Kernel):
    """PyTorch's flash attention for CPUs, sample by sample. Key-value heads are its batch: none is repeated."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys in _sequences(lengths):
            found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_by_group(q.shape[1], q[rows], k[keys], v[keys]), 0.0, lengths is not None
            )
            out[rows], log_sum[rows] = _ungrouped(found), _ungrouped(sums.unsqueeze(-1)).squeeze(-1)
        return out, log_sum

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum, lengths = of
        heads, gradients = q.shape[1], tuple(torch.empty_like(x) for x in (q, k, v))
        for rows, keys in _sequences(lengths):
            mine = (gradient[rows], q[rows], k[keys], v[keys], out[rows])
            slope, *parts, result = _by_group(heads, *mine, kv_heads=k.shape[1])
            sums = log_sum[rows].T.unflatten(0, (k.shape[1], -1)).contiguous()
            of_parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                slope, *parts, result, sums, 0.0, lengths is not None
            )
            for whole, place, part in zip(gradients, (rows, keys, keys), of_parts, strict=True):
                # [kv_heads, group, n, d]; a key-value head gathers what its group gives.
                summed = part if whole.shape[1] == heads else part.sum(1, keepdim=True)
                whole[place] = _ungrouped(summed)
        return gradients  # type: ignore[return-value]


def _sequences(lengths: Sequence[int] | None) -> list[tuple[slice, slice]]:
    """(queries, keys) of each sequence."""
    if lengths is None:
        return [(slice(None), slice(None))]
    return [(slice(*bounds), slice(*bounds)) for bounds in pairwise(_ends(lengths))]


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        if not len(q):
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_bounds(q, k, lengths), 0.0, lengths is not None, return_debug_mask=False
        )
        return out, sums.T

    def backward(self, gradient: Tensor, of: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum, lengths = of
        if not len(q):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # There is no dropout, whose random state this would be.
        state = torch.zeros(2, dtype=torch.uint64, device=gradient.device)
        unused = torch.empty(0, dtype=torch.uint64, device=gradient.device)
        return torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q, k, v, out, log_sum.T.contiguous(), *_bounds(q, k, lengths), 0.0,
            lengths is not None, state, unused,
        )  # fmt: skip


def _bounds(q: Tensor, k: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor, int, int]:
    """Ends of the sequences of queries and of keys, and their maximum lengths."""
    of_both = ((len(q),), (len(k),)) if lengths is None else (tuple(lengths),) * 2
    ends = (_ends_on(of_one, q.device) for of_one in of_both)
    return (*ends, *(max(of_one, default=0) for of_one in of_both))  # type: ignore[return-value]


@lru_cache(maxsize=32)
def _ends_on(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once for all steps of a micro-batch, forward and backward."""
    return to_device([torch.tensor(_ends(lengths), dtype=torch.int32)], device)[0]
