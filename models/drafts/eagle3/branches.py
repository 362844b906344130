"""EAGLE-2's dynamic trees from every position of finished texts at once: where the text's own tokens stand in them.

Growing does not depend on how many tokens a tree keeps, and up to a depth not on what lies below it. So one growth
says of every depth and every number of tokens how much of the text such a tree would have held
(`models.decoding.tree_walk`). The beams of all positions run through the layers together: each attends to the text
before its position, and to its own path, as the rows of a training step do.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from models.drafts.batched_proposer import PackedTexts
from models.drafts.eagle3.attention import Earlier, step_attention
from models.drafts.growing_trees import Beams, GrowingTrees
from models.drafts.trees import ABSENT

if TYPE_CHECKING:
    from models.drafts.eagle3.unrolled import UnrolledDraft


@torch.no_grad()
def ranks_along(draft: "UnrolledDraft", texts: PackedTexts, rows: Tensor, topk: int, depth: int) -> Tensor:
    """See `BranchingSource.ranks_along`."""
    if not len(rows):
        return rows.new_empty(0, depth, depth)
    trees, layers = GrowingTrees(len(rows), topk, rows.device), _Layers(draft, texts, rows, topk)
    for at in range(depth):
        if at:
            layers.descend(trees.descend(), at)
        trees.add(layers.normed.transpose(0, 1), draft.logits, draft.target_ids)
    left, text = texts.places[1][rows], F.pad(texts.following, (0, depth))
    own = torch.stack([torch.where(step < left, text[rows + 1 + step], ABSENT) for step in range(depth)], dim=1)
    return trees.ranks_of(own)


class _Layers:
    """The hidden states of w beams from n positions: at first of the last token of each one's text."""

    def __init__(self, draft: "UnrolledDraft", texts: PackedTexts, rows: Tensor, topk: int):
        self.draft, self.rows, self.topk = draft, rows, topk
        self.one = draft.begin()
        self.positions = texts.places[0]
        self.verified: list[tuple[Tensor, Tensor]] = []
        """Keys and values of all texts' rows, by layer."""
        hidden = draft.enter(self.one, texts.following, self.positions, draft.fuse(texts.aux))
        for index, weights in enumerate(self.one.weights):
            q, k, v = draft.project(self.one, index, texts.following, self.positions, hidden)
            self.verified.append((k, v))
            attended = step_attention(q, [(k, v)], texts.lengths, window=draft.config.windows[index])
            hidden = draft.decoder_layers[index].finish(hidden, attended, weights)
        self.lengths, self.before = _runs(texts, rows)
        self._take(hidden[rows].unsqueeze(0))
        self.paths: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.one.weights]
        """By layer, keys and values `[w, n, kv_heads, d]` of each beam's path, depth after depth."""

    def _take(self, raw: Tensor) -> None:
        """Raw hidden states `[w, n, h]`."""
        self.normed = self.draft.norm(raw)
        self.fed_back = self.normed if self.draft.config.norm_output else raw

    def descend(self, beams: Beams, depth: int) -> None:
        """Go on with the beams of this depth, from 1 on."""
        parents, at = beams.parents.T, torch.arange(len(self.rows), device=self.rows.device)
        hidden = self.fed_back[parents, at].flatten(0, 1)
        self.paths = [[(k[parents, at], v[parents, at]) for k, v in path] for path in self.paths]
        positions, tokens = (self.positions[self.rows] + depth).repeat(self.topk), beams.tokens.T.flatten()
        hidden = self.draft.enter(self.one, tokens, positions, hidden)
        for index in range(len(self.paths)):
            hidden = self._run(index, tokens, positions, hidden)
        self._take(hidden.unflatten(0, (self.topk, -1)))

    def _run(self, index: int, tokens: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """A layer's output of the rows of all beams, one beam after the other."""
        draft, (k, v) = self.draft, self.verified[index]
        q, *own = (x.unflatten(0, (self.topk, -1)) for x in draft.project(self.one, index, tokens, positions, hidden))
        self.paths[index].append((own[0], own[1]))
        first, earlier = (k[self.rows], v[self.rows]), Earlier(k, v, self.before)
        attended = [
            step_attention(
                q[beam], [first, *((k[beam], v[beam]) for k, v in self.paths[index])], self.lengths,
                earlier=earlier, window=draft.config.windows[index],
            )
            for beam in range(self.topk)
        ]  # fmt: skip
        return draft.decoder_layers[index].finish(hidden, torch.cat(attended), self.one.weights[index])


def _runs(texts: PackedTexts, rows: Tensor) -> tuple[list[int], tuple[slice, ...]]:
    """Of each text with wanted rows: how many, one after the other, and its rows before the first of them."""
    wanted, lengths, before, start = rows.tolist(), list[int](), list[slice](), 0
    for length in texts.lengths:
        inside = [row for row in wanted if start <= row < start + length]
        if inside:
            assert inside == list(range(inside[0], inside[-1] + 1))
            lengths.append(len(inside))
            before.append(slice(start, inside[0]))
        start += length
    return lengths, tuple(before)
