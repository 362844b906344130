"""EAGLE-3 while decoding: chains and trees for one sequence, with the draft's own key-value cache. Runs in benchmarks.

A tree (EAGLE-2, arXiv 2406.16858) runs through the layer one depth at a time: every place attends to the verified rows
and to the places on its own path.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from models.decoding.sampling import Sampling
from models.drafts.base import Proposals
from models.drafts.layers import rotary_tables
from models.drafts.trees import ROOT, Candidates, Growing, Tree, TreeShape, children, grow

if TYPE_CHECKING:
    from models.drafts.eagle3.module import Eagle3Draft


class Eagle3Proposer:
    """Proposals for one sequence; the cache holds verified rows only."""

    def __init__(self, draft: "Eagle3Draft"):
        self.draft = draft
        config = draft.config
        empty = draft.fc.weight.new_empty(0, config.num_kv_heads, config.head_dim)
        self.keys, self.values = empty, empty

    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Greedy proposals `[lookahead]` (see Proposer)."""
        return self._chain(sequence, aux, lookahead, self.draft.best_tokens)

    def sample(self, sequence: Tensor, aux: Tensor, lookahead: int, sampling: Sampling) -> Proposals:
        """Sampled proposals; what lies outside the draft vocabulary has probability 0 (see Proposer)."""
        draft = self.draft
        drawn_from: list[Tensor] = []

        def choose(normed: Tensor) -> Tensor:
            drawn_from.append(sampling.distribution(draft.logits(normed)))
            return draft.target_ids[sampling.draw(drawn_from[-1])]

        tokens = self._chain(sequence, aux, lookahead, choose)
        probabilities = drawn_from[0].new_zeros(lookahead, draft.vocabulary.target_size)
        probabilities[:, draft.target_ids] = torch.cat(drawn_from)
        return Proposals(tokens, probabilities)

    @torch.no_grad()
    def propose_tree(self, sequence: Tensor, aux: Tensor, shape: TreeShape, sampling: Sampling) -> Tree:
        """A static or dynamic tree (see TreeProposer)."""
        draft, branches = self.draft, _Branches(self, self._catch_up(sequence, aux))

        def expand(grown: Growing, nodes: Sequence[int], width: int) -> Candidates:
            normed = draft.norm(branches.run(grown, nodes))
            logits = draft.logits(normed)
            return children(logits, draft.target_ids, width, draft.vocabulary.target_size, shape, sampling)

        return grow(shape, expand, sequence.device)

    @torch.no_grad()
    def _chain(self, sequence: Tensor, aux: Tensor, lookahead: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Catch up on `aux`'s rows, then chain `lookahead` tokens `choose`n from normed hidden states `[1, H]`."""
        draft = self.draft
        hidden = self._catch_up(sequence, aux)
        keys, values = self.keys, self.values
        proposals = []
        for offset in range(lookahead):
            normed = draft.norm(hidden)
            proposals.append(choose(normed))
            if offset + 1 < lookahead:
                fed_back = normed if draft.config.norm_output else hidden
                hidden, keys, values = self._step(proposals[-1], fed_back, len(keys), keys, values)
        return torch.cat(proposals)

    def _catch_up(self, sequence: Tensor, aux: Tensor) -> Tensor:
        """Take in the verified rows of `aux`; the raw hidden state `[1, H]` of the last one."""
        start = len(self.keys)
        assert len(sequence) == start + len(aux) + 1, "every verified position's features are handed over exactly once"
        fused = self.draft.fuse(aux)
        hidden, self.keys, self.values = self._step(sequence[start + 1 :], fused, start, self.keys, self.values)
        return hidden[-1:]

    def _step(
        self, tokens: Tensor, hidden: Tensor, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer over rows `start ..`; returns raw hidden states and the grown cache."""
        layer = self.draft.midlayer
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        q, k, v = self.project(tokens, hidden, positions)
        keys, values = torch.cat([keys, k]), torch.cat([values, v])
        return layer.finish(hidden, layer.self_attn.first(q, keys, values)), keys, values

    def project(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows that embed `tokens` and go on from `hidden` `[n, H]`."""
        draft, layer = self.draft, self.draft.midlayer
        tables = rotary_tables(positions, draft.config.head_dim, draft.config.rope_theta)
        x = layer.attention_input(F.embedding(tokens, draft.embed_tokens.weight), hidden)
        return layer.self_attn.project(x, tables)


class _Branches:
    """The draft's hidden states along the branches of one growing tree."""

    def __init__(self, proposer: Eagle3Proposer, root: Tensor):
        self.proposer = proposer
        self.keys, self.values = proposer.keys, proposer.values
        self.hidden: dict[int, Tensor] = {ROOT: root[0]}
        self.columns: dict[int, int] = {}
        """Where a place's key stands."""

    def run(self, grown: Growing, nodes: Sequence[int]) -> Tensor:
        """Raw hidden states `[m, H]` of places of one depth, whose parents ran before."""
        if list(nodes) == [ROOT]:
            return self.hidden[ROOT].unsqueeze(0)
        draft, layer, verified = self.proposer.draft, self.proposer.draft.midlayer, len(self.proposer.keys)
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
