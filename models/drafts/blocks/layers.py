"""Decoder layers of block drafts: a block attends to itself and to the target's features, mere keys and values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config.blocks import ROWS_AT_ONCE, BlockConfig
from models.drafts.layers import AttentionProjections, GatedMLP, RMSNorm
from models.drafts.row_functions import Tables
from models.drafts.transfer import to_device

KeysValues = tuple[Tensor, Tensor]
"""Rotated keys and values, each `[N, kv_heads, d]`."""
BlockAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries `[A*B, heads, d]`, keys and values `[A*B, kv_heads, d]` of blocks) -> what they attend to, the target's
features included: `[A*B, heads * d]`."""


@dataclass(frozen=True)
class Blocks:
    """A blocks over packed features; on the host, which divides them."""

    tokens: Tensor
    """`[A]` int64, each block's known token."""
    positions: Tensor
    """`[A]` int64, where in its sample that token stands: the features before it are seen. Ascending in a sample."""
    starts: Tensor
    """`[A]` int64, where the sample's features begin; ascending."""


@dataclass(frozen=True)
class View:
    """Some blocks of one sample, and what their rows see."""

    rows: slice
    """Positions of the blocks' rows."""
    features: slice
    """Positions of the packed features."""
    mask: Tensor
    """`[rows, features + rows]` in the keys' dtype: 0 where something is seen, minus infinity elsewhere."""


def views(blocks: Blocks, block_size: int, window: int | None, like: Tensor, *, ahead: bool = False) -> list[View]:
    """What every block sees: without a window everything; with one the window's positions, up to the row's own unless
    `ahead`. Masks are of the device and dtype of `like`, the keys."""
    found = []
    starts, positions = blocks.starts.tolist(), blocks.positions.tolist()
    (on_device,) = to_device([blocks.positions], like.device)
    for first, end in _together(starts, max(1, ROWS_AT_ONCE // block_size)):
        low = 0 if window is None else max(0, positions[first] - window + 1)
        features = slice(starts[first] + low, starts[first] + positions[end - 1])
        anchors = on_device[first:end, None].expand(-1, block_size).flatten()
        offsets = torch.arange(block_size, device=anchors.device).repeat(end - first)
        own = anchors + offsets
        place = torch.arange(low, positions[end - 1], device=anchors.device)
        before, block = place < anchors[:, None], anchors[:, None] == anchors
        if window is not None:
            before &= place > own[:, None] - window
            block &= own > own[:, None] - window
            block &= (own <= own[:, None]) | ahead
        rows = slice(first * block_size, end * block_size)
        unseen = ~torch.cat([before, block], dim=1)
        # A mask of truth values would be made such a sum in every layer, and kept there for the backward pass.
        found.append(View(rows, features, like.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))))
    return found


def _together(starts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, end) of neighbours with the same start, each at most `most` long."""
    first = 0
    for index in range(1, len(starts) + 1):
        if index == len(starts) or starts[index] != starts[first] or index - first == most:
            yield first, index
            first = index


@dataclass(frozen=True)
class PackedAttention:
    """A layer's attention over packed features, sample by sample."""

    features: KeysValues
    seen: Sequence[View]

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `BlockAttention`."""
        attended = []
        for view in self.seen:
            q = queries[view.rows]
            k, v = (
                torch.cat([given[view.features], own[view.rows]])
                for given, own in zip(self.features, (keys, values), strict=True)
            )
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
            out = _masked_attention(q, k, v, view.mask)
            attended.append(out.squeeze(0).transpose(0, 1).flatten(1))
        return torch.cat(attended)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention `[1, heads, n, d]` of `q` to `k` and `v` `[1, kv_heads, m, d]`, with a mask `[n, m]`."""
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.device.type != "cpu":
        # With a mask and grouped heads CUDA has no kernel but the plain one in float32, so the keys are repeated.
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


class BlockRowsAttention(AttentionProjections):
    """Grouped-query attention with normed queries and keys (Qwen3's)."""

    def __init__(self, config: BlockConfig, hidden_size: int):
        super().__init__(config, hidden_size, hidden_size, qk_norm=True)

    def keys_values(self, x: Tensor, tables: Tables) -> KeysValues:
        """`[N, H]` block rows or fused features to rotated keys and values."""
        values = self.values(self.v_proj(x))
        return self.keys(self.k_proj(x), tables), values

    def forward(self, x: Tensor, tables: Tables, attention: BlockAttention) -> Tensor:
        """Block rows `[A*B, H]` to `[A*B, H]`."""
        keys, values = self.keys_values(x, tables)
        return self.o_proj(attention(self.queries(self.q_proj(x), tables), keys, values))


class BlockLayer(nn.Module):
    """Norm before attention and before the feed-forward, as in Qwen3. Features come as they are."""

    def __init__(self, config: BlockConfig, hidden_size: int):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.self_attn = BlockRowsAttention(config, hidden_size)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor, tables: Tables, attention: BlockAttention) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables, attention)
        return self.mlp.weights().add_to(hidden, self.post_attention_layernorm(hidden))
