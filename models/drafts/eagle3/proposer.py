"""EAGLE-3 while decoding: chains and trees for several texts, with the draft's own key-value cache.

A tree (EAGLE-2, arXiv 2406.16858) runs through the layer one depth at a time: every place attends to the verified rows
and to the places on its own path. Trees grow text by text.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from models.drafts.batched_proposer import Choice, Turn
from models.drafts.cache import CachedProposer
from models.drafts.layers import rotary_tables
from models.drafts.trees import ROOT, Candidates, Growing, Tree, children, grow

if TYPE_CHECKING:
    from models.drafts.eagle3.module import Eagle3Draft


class Eagle3Proposer(CachedProposer):
    """Proposals for B texts (see `Proposer`)."""

    branches = True

    def __init__(self, draft: "Eagle3Draft", rows: int):
        config = draft.config
        super().__init__(rows, 1, draft.fc.weight.new_empty(0, config.num_kv_heads, config.head_dim))
        self.draft, self.cache = draft, self.caches[0]

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
        return {
            row: chains[row] if isinstance(turn.shape, int) else self._tree(row, newest[row], turn)
            for row, turn in turns.items()
        }

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
        """Run the layer over the rows' next positions, which see themselves and all before them.

        Args:
            tokens: `[B, T]` int64, what they embed.
            hidden: `[B * T, H]`, their previous outputs.
            positions: `[B, T]` int64.
            columns: more than any position.

        Returns:
            Raw hidden states `[B * T, H]`.
        """
        self.cache.reserve(columns)
        q, k, v = self.project(tokens.flatten(), hidden, positions.flatten())
        self.cache.write(positions, k.unflatten(0, positions.shape), v.unflatten(0, positions.shape))
        visible = torch.arange(columns, device=positions.device) <= positions.unsqueeze(-1)
        attended = self.cache.attend(q.unflatten(0, positions.shape), visible)
        return self.draft.midlayer.finish(hidden, attended.flatten(0, 1))

    def project(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows `[n]` from `tokens` and previous outputs `hidden` `[n, H]`."""
        draft, layer = self.draft, self.draft.midlayer
        tables = rotary_tables(positions, draft.config.head_dim, draft.config.rope_theta)
        x = layer.attention_input(F.embedding(tokens, draft.embed_tokens.weight), hidden)
        return layer.self_attn.project(x, tables)

    def _tree(self, row: int, newest: Tensor, turn: Turn) -> Tree:
        assert not isinstance(turn.shape, int)
        draft, shape, branches = self.draft, turn.shape, _Branches(self, row, newest)

        def expand(grown: Growing, nodes: Sequence[int], width: int) -> Candidates:
            normed = draft.norm(branches.run(grown, nodes))
            logits = draft.logits(normed)
            return children(logits, draft.target_ids, width, draft.vocabulary.target_size, shape, turn.sampling)

        return grow(shape, expand, newest.device)


class _Branches:
    """The draft's hidden states along the branches of one growing tree."""

    def __init__(self, proposer: Eagle3Proposer, row: int, root: Tensor):
        self.proposer, self.verified = proposer, proposer.lengths[row]
        cache = proposer.cache
        self.keys, self.values = (part[row, :, : self.verified].transpose(0, 1) for part in (cache.keys, cache.values))
        self.hidden: dict[int, Tensor] = {ROOT: root}
        self.columns: dict[int, int] = {}
        """Where a place's key stands."""

    def run(self, grown: Growing, nodes: Sequence[int]) -> Tensor:
        """Raw hidden states `[m, H]` of places of one depth, whose parents ran before."""
        if list(nodes) == [ROOT]:
            return self.hidden[ROOT].unsqueeze(0)
        draft, layer, verified = self.proposer.draft, self.proposer.draft.midlayer, self.verified
        before = torch.stack([self.hidden[grown.parents[node]] for node in nodes])
        fed_back = draft.norm(before) if draft.config.norm_output else before
        tokens = torch.tensor([grown.tokens[node] for node in nodes], device=before.device)
        positions = torch.full_like(tokens, verified + grown.depth(nodes[0]) - 1)
        q, k, v = self.proposer.project(tokens, fed_back, positions)
        self.columns |= {node: len(self.keys) + row for row, node in enumerate(nodes)}
        self.keys, self.values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        visible = torch.zeros(len(nodes), len(self.keys), dtype=torch.bool, device=before.device)
        visible[:, :verified] = True
        for row, node in enumerate(nodes):
            visible[row, self._path(grown, node)] = True
        attended = F.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q, self.keys, self.values)),
            attn_mask=visible,
            enable_gqa=layer.self_attn.heads != layer.self_attn.kv_heads,
        )
        hidden = layer.finish(fed_back, attended.squeeze(0).transpose(0, 1).flatten(1))
        self.hidden |= dict(zip(nodes, hidden, strict=True))
        return hidden

    def _path(self, grown: Growing, node: int) -> list[int]:
        """Columns of a place and of all above it."""
        path = []
        while node != ROOT:
            path.append(self.columns[node])
            node = grown.parents[node]
        return path
