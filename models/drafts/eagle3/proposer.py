"""EAGLE-3 while decoding: chains and trees for several texts, with the draft's own key-value caches.

A tree (EAGLE-2, arXiv 2406.16858) runs through the layers one depth at a time: every place attends to the verified rows
and to the places on its own path. The trees of all texts grow together.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.drafts.batched_proposer import Choice, Turn
from models.drafts.cache import CachedProposer, RaggedCache
from models.drafts.growing_trees import GrowingTrees
from models.drafts.trees import DynamicTree, Tree

if TYPE_CHECKING:
    from models.drafts.eagle3.unrolled import UnrolledDraft


class Eagle3Proposer(CachedProposer):
    """Proposals for B texts (see `Proposer`)."""

    branches = True

    def __init__(self, draft: "UnrolledDraft", rows: int):
        config = draft.config
        empty = draft.norm.weight.new_empty(0, config.num_kv_heads, config.head_dim)
        super().__init__(rows, len(config.layer_types), empty)
        self.draft, self.one = draft, draft.begin()

    @torch.no_grad()
    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`."""
        draft, newest = self.draft, self._catch_up(turns)
        every = [turns.get(row) for row in range(len(self.lengths))]
        choice = Choice(every, draft.target_ids, draft.vocabulary.target_size)
        positions = torch.tensor(self.lengths, device=newest.device).unsqueeze(1)
        hidden, columns = newest, max(self.lengths)
        for offset in range(choice.longest):
            normed = draft.norm(hidden)
            tokens = choice.next(draft.logits(normed))
            if offset + 1 < choice.longest:
                fed_back = normed if draft.config.norm_output else hidden
                hidden = self.step(tokens.unsqueeze(1), fed_back, positions + offset, columns + offset + 1)
        chains = choice.chains()
        shapes = {turn.shape for turn in turns.values() if not isinstance(turn.shape, int)}
        grown = {shape: self._grow(newest, shape) for shape in shapes}
        return {row: (chains if isinstance(turn.shape, int) else grown[turn.shape])[row] for row, turn in turns.items()}

    def _catch_up(self, turns: Mapping[int, Turn]) -> Tensor:
        """Take in the verified positions that are new; the raw hidden state `[B, H]` of each row's last one.

        What pads them is overwritten before it is seen.
        """
        before, (aux, positions, new) = max(self.lengths), self.arrive(turns)
        most = max(new)
        texts = [
            [*turns[row].text[-count:], *[0] * (most - count)] if count else [0] * most for row, count in enumerate(new)
        ]
        fused = self.draft.fuse(aux.flatten(0, 1))
        hidden = self.step(torch.tensor(texts, device=aux.device), fused, positions, before + most)
        last = [row * most + max(0, count - 1) for row, count in enumerate(new)]
        return hidden[last]

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Run the layers over the rows' next positions, which see themselves and all before them.

        Args:
            tokens: `[B, T]` int64, what they embed.
            hidden: `[B * T, h]`, their previous outputs.
            positions: `[B, T]` int64.
            columns: more than any position.

        Returns:
            Raw hidden states `[B * T, h]`.
        """
        column, own = torch.arange(columns, device=positions.device), positions.unsqueeze(-1)
        seen = column <= own
        windows = set(self.draft.config.windows)
        visible = {window: seen if window is None else seen & (column > own - window) for window in windows}
        return self.run(self.caches, tokens, hidden, positions, positions, visible)

    def run(
        self,
        caches: Sequence[RaggedCache],
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        places: Tensor,
        visible: Mapping[int | None, Tensor],
    ) -> Tensor:
        """See `step`; keys go to the columns `places` `[B, T]`, and rows see what is `visible` `[B, T, S]` bool through
        a layer's window."""
        draft, embedded, at = self.draft, tokens.flatten(), positions.flatten()
        hidden = draft.enter(self.one, embedded, at, hidden)
        for index, (layer, cache, weights) in enumerate(
            zip(draft.decoder_layers, caches, self.one.weights, strict=True)
        ):
            seen = visible[draft.config.windows[index]]
            cache.reserve(seen.shape[-1])
            q, k, v = draft.project(self.one, index, embedded, at, hidden)
            cache.write(places, k.unflatten(0, places.shape), v.unflatten(0, places.shape))
            attended = cache.attend(q.unflatten(0, places.shape), seen)
            hidden = layer.finish(hidden, attended.flatten(0, 1), weights)
        return hidden

    def _grow(self, newest: Tensor, shape: DynamicTree) -> list[Tree]:
        """The trees of all rows. Keys of places go to the columns behind the verified ones, for the time being."""
        draft, lengths = self.draft, torch.tensor(self.lengths, device=newest.device).unsqueeze(1)
        trees, raw = GrowingTrees(len(newest), shape.topk, newest.device), newest.unsqueeze(1)
        slots, paths = torch.arange(shape.topk, device=newest.device), torch.empty(0)
        for depth in range(1, shape.depth + 1):
            normed = draft.norm(raw)
            trees.add(normed, draft.logits, draft.target_ids)
            if depth == shape.depth:
                break
            beams, fed_back = trees.descend(), normed if draft.config.norm_output else raw
            before = fed_back.take_along_dim(beams.parents.unsqueeze(-1), dim=1)
            places = lengths + (depth - 1) * shape.topk + slots
            own = places.unsqueeze(-1)
            paths = own if depth == 1 else torch.cat([paths.take_along_dim(beams.parents.unsqueeze(-1), 1), own], -1)
            visible = {w: self._sight(lengths, paths, depth, shape, w) for w in set(draft.config.windows)}
            positions = (lengths + depth - 1).expand_as(places)
            hidden = self.run(self.caches, beams.tokens, before.flatten(0, 1), positions, places, visible)
            raw = hidden.unflatten(0, places.shape)
        return trees.kept(shape.tokens)

    def _sight(self, lengths: Tensor, paths: Tensor, depth: int, shape: DynamicTree, window: int | None) -> Tensor:
        """`[B, topk, S]` bool: what places of one depth see through a window, `paths` `[B, topk, depth]` of columns."""
        column = torch.arange(max(self.lengths) + depth * shape.topk, device=paths.device)
        verified = column < lengths
        if window is not None:
            verified &= column >= lengths + depth - window
        verified = verified.unsqueeze(1).expand(-1, paths.shape[1], -1)
        seen = paths if window is None else paths[..., -window:]
        return verified.scatter(-1, seen, True)
