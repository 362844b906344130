"""Texts that one target forward verifies together: ragged lengths, ragged acceptance, trees. Runs in benchmarks.

Every row of the key-value cache begins at column 0, and row r's first `lengths[r]` columns are its text. A step appends
the same number of columns to all rows, so a shorter row leaves a gap, which nothing sees. Afterwards each row's
accepted columns move to the end of its text (realignment), and the cache is cut to the longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from models.decoding.plain import Prefill
from models.drafts.trees import Tree, ancestors, depths
from models.targets.model import Placement, TargetModel


@dataclass(frozen=True)
class Verification:
    """A tree of n proposals, and what the target says of it: row 0 is the last emitted token, row i + 1 proposal i."""

    tree: Tree
    aux: Tensor
    """`[n + 1, K*H]` target features."""
    logits: Tensor
    """`[n + 1, V]`."""


class TargetBatch:
    """The target's cache for several texts.

    Args:
        target: the target.
        starts: the texts after their prefill, which are not to be used elsewhere any more.
    """

    def __init__(self, target: TargetModel, starts: Sequence[Prefill]):
        self.target = target
        self.lengths = [len(start.prompt) for start in starts]
        self.cache = starts[0].cache if len(starts) == 1 else _merged(target, starts)

    def place(self, last: Sequence[int], trees: Sequence[Tree]) -> tuple[Tensor, Placement | None]:
        """`[B, n + 1]` tokens of the next forward, the last emitted one of each row first, and where they stand.

        None: every row goes on at the same column with a chain of the same length, as a plain forward does.
        """
        device = self.target.device
        proposed = pad_sequence([tree.proposals.tokens for tree in trees], batch_first=True)
        tokens = torch.cat([torch.tensor(last, device=device).unsqueeze(1), proposed], dim=1)
        columns, size = self.cache.get_seq_length(), tokens.shape[1]
        even = all(length == columns for length in self.lengths)
        if even and all(tree.is_chain and len(tree.parents) + 1 == size for tree in trees):
            return tokens, None
        lengths = torch.tensor(self.lengths, device=device)
        below = torch.stack([depths(tree.parents, size) for tree in trees]).to(device)
        seen = torch.stack([ancestors(tree.parents, size) for tree in trees]).to(device)
        past = torch.arange(columns, device=device)
        positions = lengths.unsqueeze(1) + below
        written = (past < lengths.unsqueeze(1)).unsqueeze(1).expand(-1, size, -1)
        everywhere = torch.cat([past.expand(len(trees), -1), positions], dim=1)
        return tokens, Placement(positions, torch.cat([written, seen], dim=-1), everywhere)

    def verify(self, tokens: Tensor, placement: Placement | None, trees: Sequence[Tree]) -> list[Verification]:
        """One target forward; the logits of what pads a tree are not computed."""
        states = self.target.forward(tokens, self.cache, placement)
        sizes = [len(tree.parents) + 1 for tree in trees]
        real = torch.arange(tokens.shape[1], device=tokens.device) < torch.tensor(sizes, device=tokens.device)[:, None]
        logits = self.target.logits(states.last[real]).split(sizes)
        aux = states.aux[real].split(sizes)
        return [Verification(*parts) for parts in zip(trees, aux, logits, strict=True)]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these columns of each row's last forward, ascending: 0 is the last emitted token, then proposals."""
        taken = max(self.lengths)
        columns = self.cache.get_seq_length()
        moves = [
            (row, taken + node, length + offset)
            for row, (length, path) in enumerate(zip(self.lengths, paths, strict=True))
            for offset, node in enumerate(path)
            if taken + node != length + offset
        ]
        if moves:
            rows, sources, places = torch.tensor(moves, device=self.target.device).T
            for stored in (part for layer in self.cache.layers for part in _stored(layer)):
                stored[rows, :, places] = stored[rows, :, sources]
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        self.cache.crop(max(self.lengths) - columns)

    def only(self, rows: Sequence[int]) -> None:
        """Let the other rows go."""
        columns = max(self.lengths)
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.batch_select_indices(torch.tensor(rows, dtype=torch.long, device=self.target.device))
        self.cache.crop(max(self.lengths) - columns)


def _merged(target: TargetModel, starts: Sequence[Prefill]) -> DynamicCache:
    """One cache of as many rows, padded at the end."""
    longest, cache = max(len(start.prompt) for start in starts), target.new_cache()
    for index in range(len(starts[0].cache.layers)):
        keys, values = zip(*(_stored(start.cache.layers[index]) for start in starts), strict=True)
        cache.update(_padded(keys, longest), _padded(values, longest), index)
    return cache


def _stored(layer: Any) -> tuple[Tensor, Tensor]:
    """`[B, heads, S, d]` keys and values; raises ValueError for a layer that keeps something else."""
    if not isinstance(layer, DynamicLayer):
        raise ValueError(
            f"the target keeps a {type(layer).__name__}: rejected proposals can only be taken out of keys and values; "
            "choose a target with attention in every layer"
        )
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _padded(parts: Sequence[Tensor], columns: int) -> Tensor:
    if any(part.shape[-2] < columns for part in parts):
        parts = [functional.pad(part, (0, 0, 0, columns - part.shape[-2])) for part in parts]
    return torch.cat(list(parts))
