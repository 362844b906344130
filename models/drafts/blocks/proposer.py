"""Block drafts while decoding: blocks of several texts are filled at once."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.drafts.batched_proposer import Choice, Turn
from models.drafts.cache import CachedProposer, RaggedCache
from models.drafts.trees import Tree

if TYPE_CHECKING:
    from models.drafts.blocks.module import BlockDraft


class BlockProposer(CachedProposer):
    """Proposals for B texts (see `Proposer`)."""

    def __init__(self, draft: "BlockDraft", rows: int):
        config = draft.config
        empty = draft.fc.weight.new_empty(0, config.num_kv_heads, config.head_dim)
        super().__init__(rows, len(config.layer_types), empty)
        self.draft = draft

    @torch.no_grad()
    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`; nothing is proposed beyond a block."""
        draft, normed = self.draft, self.fill(turns)
        every = [turns.get(row) for row in range(len(self.lengths))]
        choice = Choice(every, draft.target_ids, draft.vocabulary.target_size, draft.positions)
        chosen = [self._known(turns)]
        for logits in draft.step_logits(normed[:, : choice.longest], lambda step: chosen[step]):
            chosen.append(choice.next(logits))
        self.confidences = draft.confidences(normed[:, : choice.longest], chosen[: choice.longest])
        chains = choice.chains()
        return {row: chains[row] for row in turns}

    def fill(self, turns: Mapping[int, Turn]) -> Tensor:
        """Store new features; normed hidden states `[B, S, H]` of the proposing rows of the blocks after them.

        Rows without a turn fill a block of no meaning.
        """
        before, (aux, positions, _) = max(self.lengths), self.arrive(turns)
        # What pads the new features is overwritten by the blocks.
        new = self.draft.feature_keys(aux.flatten(0, 1), positions.flatten())
        for cache, (keys, values) in zip(self.caches, new, strict=True):
            cache.reserve(before + aux.shape[1] + self.draft.config.block_size)
            cache.write(positions, keys.unflatten(0, positions.shape), values.unflatten(0, positions.shape))
        device = self.draft.fc.weight.device
        size, columns = self.draft.config.block_size, max(self.lengths) + self.draft.config.block_size
        anchors = torch.tensor(self.lengths, device=device)
        own = anchors[:, None] + torch.arange(size, device=device)
        config = self.draft.config
        visible = {window: _visible(own, columns, window, config.sliding_sees_ahead) for window in set(config.windows)}
        attentions = [
            partial(_attend, cache, own, visible[window])
            for cache, window in zip(self.caches, config.windows, strict=True)
        ]
        return self.draft.fill_by(self._known(turns), anchors, attentions)

    def _known(self, turns: Mapping[int, Turn]) -> Tensor:
        """`[B]` int64, each text's last token."""
        tokens = [turns[row].text[-1] if row in turns else 0 for row in range(len(self.lengths))]
        return torch.tensor(tokens, device=self.draft.fc.weight.device)


def _visible(own: Tensor, columns: int, window: int | None, ahead: bool) -> Tensor:
    """`[B, T, columns]` bool: what blocks at positions `own` `[B, T]` see; with a window nothing ahead, or `ahead`."""
    place = torch.arange(columns, device=own.device)
    last = own if window is not None and not ahead else own[:, -1:].expand_as(own)
    seen = place <= last[:, :, None]
    return seen if window is None else seen & (place > own[:, :, None] - window)


def _attend(cache: RaggedCache, own: Tensor, visible: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Store blocks after their texts in the cache; the next verified tokens overwrite them."""
    cache.write(own, keys.unflatten(0, own.shape), values.unflatten(0, own.shape))
    return cache.attend(queries.unflatten(0, own.shape), visible).flatten(0, 1)
