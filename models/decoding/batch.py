"""Texts that one target forward verifies together: ragged lengths, ragged acceptance, trees.

Every row of the key-value cache begins at column 0, and row r's first `lengths[r]` columns are its text. A step writes
each row's tokens after its own text. Accepted proposals of a chain are then in place; those of a tree move
there (realignment). What was rejected is seen no more, and overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from models.decoding.plain import Prefill
from models.drafts.cache import RaggedCache
from models.drafts.trees import Tree, ancestors, depths
from models.targets.model import Placement, TargetModel


@dataclass(frozen=True)
class Verification:
    """Trees of n proposals, and what the target says of them: a text has a row for its last token, then one for each.

    M is the number of all texts' rows.
    """

    trees: Sequence[Tree]
    tokens: list[list[int]]
    """Tokens of each text, padded."""
    aux: Sequence[Tensor]
    """`[n + 1, K*H]` target features of each text."""
    logits: Tensor
    """`[M, V]`."""

    @property
    def sizes(self) -> list[int]:
        """Rows of each text."""
        return [len(tree.parents) + 1 for tree in self.trees]


class TargetBatch:
    """The target's cache for several texts.

    Args:
        target: the target.
        starts: the texts after their prefill. Their keys and values are copied, layer by layer, and let go.
    """

    def __init__(self, target: TargetModel, starts: Sequence[Prefill]):
        self.target = target
        self.lengths = [len(start.prompt) for start in starts]
        self.written: Tensor | None = None
        """`[B, T]` columns of the newest forward's tokens."""
        first = starts[0].cache.layers
        layers: list[Any] = [
            layer if isinstance(layer, DummyLayer) else _Layer(self, [start.cache.layers[index] for start in starts])
            for index, layer in enumerate(first)
        ]
        self.layers = [layer for layer in layers if isinstance(layer, _Layer)]
        self.cache = Cache(layers=layers)

    def place(self, last: Sequence[int], trees: Sequence[Tree]) -> tuple[Tensor, Placement | None]:
        """`[B, n + 1]` tokens of the next forward, the last emitted one of each row first, and where they stand.

        None: all rows have the same length and chains of the same length, as in a plain forward.
        """
        device, first = self.target.device, torch.tensor(last, device=self.target.device).unsqueeze(1)
        proposed = pad_sequence([tree.proposals.tokens for tree in trees], batch_first=True)
        tokens = torch.cat([first, proposed], dim=1)
        size, columns = tokens.shape[1], max(self.lengths) + tokens.shape[1]
        lengths, chains = torch.tensor(self.lengths, device=device).unsqueeze(1), all(tree.is_chain for tree in trees)
        self.written = written = lengths + torch.arange(size, device=device)
        if chains and len({*self.lengths}) == len({len(tree.parents) for tree in trees}) == 1:
            return tokens, None
        place = torch.arange(columns, device=device).expand(len(trees), -1)
        if chains:
            return tokens, Placement(written, place.unsqueeze(1) <= written.unsqueeze(-1), place)
        positions = lengths + torch.stack([depths(tree.parents, size) for tree in trees]).to(device)
        own = torch.stack([ancestors(tree.parents, size) for tree in trees]).to(device)
        before = (place < lengths).unsqueeze(1).repeat(1, size, 1)
        visible = before.scatter(2, written.unsqueeze(1).expand(-1, size, -1), own)
        return tokens, Placement(positions, visible, place.scatter(1, written, positions))

    def verify(self, tokens: Tensor, placement: Placement | None, trees: Sequence[Tree]) -> Verification:
        """One target forward; the logits of what pads a tree are not computed."""
        for layer in self.layers:
            layer.stored.reserve(max(self.lengths) + tokens.shape[1])
        states = self.target.forward(tokens, self.cache, placement)
        sizes = [len(tree.parents) + 1 for tree in trees]
        last = torch.cat([rows[:size] for rows, size in zip(states.last, sizes, strict=True)])
        aux = [rows[:size] for rows, size in zip(states.features, sizes, strict=True)]
        return Verification(trees, tokens.tolist(), aux, self.target.logits(last))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these tokens of each row's last forward, ascending: 0 is the last emitted token, then proposals."""
        moves = [
            (row, length + node, length + offset)
            for row, (length, path) in enumerate(zip(self.lengths, paths, strict=True))
            for offset, node in enumerate(path)
            if node != offset
        ]
        if moves:
            for layer in self.layers:
                layer.stored.move(moves)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def only(self, rows: Sequence[int]) -> None:
        """Let the other rows go."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.stored.only(rows)


class _Layer(CacheLayerMixin):
    """What a layer of the target reads and writes, as transformers wants it."""

    def __init__(self, batch: TargetBatch, starts: Sequence[Any]):
        super().__init__()
        self.batch, self.is_initialized = batch, True
        like = [part[0].transpose(0, 1)[:0] for part in (starts[0].keys, starts[0].values)]
        self.stored = RaggedCache(len(starts), *like)
        self.stored.reserve(max(batch.lengths))
        for row, start in enumerate(starts):
            self.stored.keys[row, :, : start.keys.shape[2]] = start.keys[0]
            self.stored.values[row, :, : start.values.shape[2]] = start.values[0]
        for start in starts:
            start.reset()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' `[B, kv_heads, T, d]`; what all rows hold by now, `[B, kv_heads, S, d]`."""
        assert self.batch.written is not None
        self.stored.write(self.batch.written, key_states.transpose(1, 2), value_states.transpose(1, 2))
        columns = self.get_seq_length() + key_states.shape[2]
        return self.stored.keys[:, :, :columns], self.stored.values[:, :, :columns]

    def get_seq_length(self) -> int:
        return max(self.batch.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError
