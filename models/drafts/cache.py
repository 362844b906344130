"""Keys and values of several texts while they are decoded, a target's or a draft's."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.drafts.batched_proposer import DraftProposer, Turn

LEAST = 128
"""Columns that are held at first, and beyond what is needed whenever they do not suffice."""


class RaggedCache:
    """Keys and values of B texts in the first columns of their rows, position p in column p.

    The attention's mask limits what is seen of a row, so entries of rejected proposals need no removal: they are seen
    no more, and overwritten.

    Args:
        rows: B.
        like: `[0, kv_heads, d]`, an empty tensor of the keys' heads, size, dtype and device.
        values: the same of the values, where their size is another.
    """

    def __init__(self, rows: int, like: Tensor, values: Tensor | None = None):
        _, heads, size = like.shape
        self.keys = like.new_zeros(rows, heads, LEAST, size)
        self.values = like.new_zeros(rows, heads, LEAST, size if values is None else values.shape[-1])
        self._rows = torch.arange(rows, device=like.device).unsqueeze(1)

    def write(self, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values `[B, T, kv_heads, d]` into `columns` `[B, T]` int64."""
        self.keys[self._rows, :, columns] = keys
        self.values[self._rows, :, columns] = values

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy columns of some rows: (row, from, to)."""
        rows, sources, places = torch.tensor(moves, device=self.keys.device).T
        for stored in (self.keys, self.values):
            stored[rows, :, places] = stored[rows, :, sources]

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns."""
        missing = columns - self.keys.shape[2]
        if missing > 0:
            # Not twice as many: that would be twice a long prompt's memory, and a step reads all columns anyway.
            more = (0, 0, 0, missing + LEAST)
            self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def attend(self, queries: Tensor, visible: Tensor) -> Tensor:
        """Grouped-query attention to the first S columns.

        Args:
            queries: `[B, T, heads, d]`.
            visible: `[B, T, S]` bool.

        Returns:
            `[B, T, heads * d]`.
        """
        columns = visible.shape[-1]
        found = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            self.keys[:, :, :columns],
            self.values[:, :, :columns],
            attn_mask=visible.unsqueeze(1),
            enable_gqa=queries.shape[2] != self.keys.shape[1],
        )
        return found.transpose(1, 2).flatten(2)

    def only(self, rows: Sequence[int]) -> None:
        """Let the other rows go."""
        chosen = torch.tensor(rows, device=self.keys.device)
        self.keys, self.values, self._rows = self.keys[chosen], self.values[chosen], self._rows[: len(rows)]


class CachedProposer(DraftProposer):
    """Proposes for B texts with keys and values: the first `lengths[r]` columns of row r were verified.

    Args:
        rows: B.
        layers: number of the draft's layers, with a cache each.
        like: see `RaggedCache`.
    """

    def __init__(self, rows: int, layers: int, like: Tensor):
        self.lengths = [0] * rows
        self.caches = [RaggedCache(rows, like) for _ in range(layers)]

    def only(self, rows: Sequence[int]) -> None:
        """Let the other rows go."""
        self.lengths = [self.lengths[row] for row in rows]
        for cache in self.caches:
            cache.only(rows)

    def arrive(self, turns: Mapping[int, Turn]) -> tuple[Tensor, Tensor, list[int]]:
        """The verified positions that are new; rows without a turn have none.

        Returns:
            Target features `[B, n, K*H]`, padded; positions `[B, n]` int64; how many of them are real in each row.
        """
        nothing = next(iter(turns.values())).aux[:0]
        parts = [turns[row].aux if row in turns else nothing for row in range(len(self.lengths))]
        aux, new = pad_sequence(parts, batch_first=True), [len(part) for part in parts]
        starts = torch.tensor(self.lengths, device=aux.device).unsqueeze(1)
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        assert all(len(turn.text) == self.lengths[row] + 1 for row, turn in turns.items()), (
            "every verified position's features are handed over exactly once"
        )
        return aux, starts + torch.arange(aux.shape[1], device=aux.device), new
