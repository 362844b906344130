"""EAGLE-3's attention over a packed batch in the training-time test, linear in tokens.

In the first step every row attends to its own sample's rows up to itself. In step j it attends to the first step's
keys as before, and to its own row's keys of steps 1..j: one column per step. Neither mask nor scores of tokens x tokens
are ever made: causal attention is a kernel that also gives the log-sum-exp of its scores, and the further columns are
merged into its result by it. The backward pass hands the kernel's own backward the merged result and the merged
log-sum-exp, with which it finds the merged probabilities (as ring attention does, arXiv 2310.01889). In the same way a
rank that has a part of a sample's rows merges what they find in the rows before them, which other ranks have too.

With a sliding window W a row of step j, which stands j positions after its row of the first step, sees W - j of the
first step's rows up to itself, and its own columns.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.drafts.eagle3.kernels import Attended, Kernel, fastest_kernel, sequence_ends
from models.fused import compiles, fused

ROWS = 256
"""Rows whose further columns are worked on at once, in float32, where that takes memory: what stays in a cache."""


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
    window: int | None = None,
) -> Tensor:
    """Attention of one step of the training-time test.

    Args:
        q: `[N, heads, d]` the step's rotated queries.
        columns: keys and values `[N, kv_heads, d]` of every step so far: the first step's are attended to causally,
            those of later steps row by row.
        lengths: rows of each packed sequence, summing to N.
        kernel: which attention; None: the fastest that these tensors allow.
        earlier: where sequences are parts of samples, what comes before them.
        window: positions that a row sees, its own included, more than there are columns; None: all.

    Returns:
        `[N, heads * d]`.
    """
    with torch.autocast(q.device.type, enabled=False):
        k, v, seen = earlier or (q[:0], q[:0], ())
        first = None if window is None else window - len(columns) + 1
        assert first is None or first > 0, "own columns are never out of sight"
        how = _AttentionSettings(kernel or fastest_kernel(q), tuple(lengths), seen, first)
        out = _StepAttention.apply(how, q, k, v, *(x for column in columns for x in column))
    return out.flatten(1)  # type: ignore[union-attr]


class _AttentionSettings(NamedTuple):
    kernel: Kernel
    lengths: tuple[int, ...]
    seen: tuple[slice, ...]
    window: int | None
    """Of the first step's rows."""


class _StepAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _AttentionSettings, *tensors: Tensor) -> Tensor:
        q, earlier_k, earlier_v, k, v, *own = tensors
        out, log_sum = how.kernel.forward(q, k, v, how.lengths, how.window)
        for rows, keys in _looking_back(how):
            before = how.kernel.forward(q[rows], earlier_k[keys], earlier_v[keys], None, how.window)
            _join(out[rows], log_sum[rows], *before)
        if own:
            out, log_sum = _merge(q, own, out, log_sum)
        ctx.how = how
        ctx.save_for_backward(out, log_sum, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, log_sum, q, earlier_k, earlier_v, k, v, *own = ctx.saved_tensors
        kernel, gradient = ctx.how.kernel, gradients[0]
        of_q, of_k, of_v = kernel.backward(gradient, Attended(q, k, v, out, log_sum, ctx.how.lengths, ctx.how.window))
        of_earlier = torch.zeros_like(earlier_k), torch.zeros_like(earlier_v)
        for rows, keys in _looking_back(ctx.how):
            before = (q[rows], earlier_k[keys], earlier_v[keys], out[rows], log_sum[rows])
            part_of = Attended(*before, None, ctx.how.window)
            found = kernel.backward(gradient[rows], part_of)
            for whole, place, part in zip((of_q, *of_earlier), (rows, keys, keys), found, strict=True):
                whole[place] += part
        of_own = _add_own_gradients(of_q, gradient, q, own, out, log_sum) if own else []
        return (None, of_q, *of_earlier, of_k, of_v, *of_own)


def _looking_back(how: _AttentionSettings) -> list[tuple[slice, slice]]:
    """(rows, earlier rows that they see) of the sequences that see any; through a window only the first rows do."""
    bounds = pairwise(sequence_ends(how.lengths))
    pairs = [(slice(*rows), keys) for rows, keys in zip(bounds, how.seen, strict=False)]
    if how.window is not None:
        reach = how.window - 1
        pairs = [(slice(r.start, min(r.stop, r.start + reach)), keys) for r, keys in pairs]
        pairs = [(rows, slice(max(k.start, k.stop - reach), k.stop)) for rows, k in pairs]
    return [(rows, keys) for rows, keys in pairs if rows.start < rows.stop and keys.start < keys.stop]


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
