"""Domino (arXiv 2605.29707): DFlash, and a recurrent state over the tokens chosen so far that corrects the logits.

Proposal k has the logits U_k + W2 SiLU(W1 [h_k; s_k]): those of its row, and a correction of low rank by the row and by
the state s_k of a GRU that has read the known token and the proposals before. The first proposal is not corrected. As
the authors train (SpecForge), the loss moves from the uncorrected logits to the corrected ones.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config.domino import DominoConfig
from models.drafts.base import TargetProjection
from models.drafts.blocks.module import BlockDraft, Scored
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import Factor, SummedLoss


class PrefixGru(nn.Module):
    """A GRU without biases, under the names of torch's; written out, so that the same kernels run on every device.

    Args:
        width: H, of an embedding.
        size: g, of the state.
    """

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(size**-0.5), size**-0.5)

    def step(self, given: Tensor, state: Tensor) -> Tensor:
        """The next state `[n, g]`, from `W_ih x` `[n, 3g]` and the state before."""
        kept = F.linear(state, self.weight_hh_l0)
        (reset_in, update_in, new_in), (reset, update, new) = given.chunk(3, dim=-1), kept.chunk(3, dim=-1)
        candidate = (new_in + (reset_in + reset).sigmoid() * new).tanh()
        gate = (update_in + update).sigmoid()
        return candidate + gate * (state - candidate)

    def project(self, embedded: Tensor) -> Tensor:
        """`W_ih x` of embeddings `[..., H]`: `[..., 3g]`."""
        return F.linear(embedded, self.weight_ih_l0)

    def along(self, embedded: Tensor) -> Tensor:
        """States `[A, S, g]` after each of the embeddings `[A, S, H]`."""
        given, states = self.project(embedded), list[Tensor]()
        state = given.new_zeros(len(given), self.weight_hh_l0.shape[1])
        for step in range(given.shape[1]):
            state = self.step(given[:, step], state)
            states.append(state)
        return torch.stack(states, dim=1)


class DominoDraft(BlockDraft):
    """A Domino draft for one target; see `BlockDraft`."""

    config: DominoConfig
    engine_class = "DFlashDraftModel"
    token_tables = ("embed_proj.2.weight",)

    def __init__(
        self, config: DominoConfig, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__(config, embedding, vocabulary, aux_layer_ids)
        hidden, size, rank = embedding.shape[1], config.gru_hidden_dim, config.emb_dim
        self.prefix_gru = PrefixGru(hidden, size)
        narrow, wide = nn.Linear(hidden + size, rank, bias=False), nn.Linear(rank, len(vocabulary), bias=False)
        self.embed_proj = nn.Sequential(narrow, nn.SiLU(), wide)
        # No correction at first: the draft begins as its backbone.
        nn.init.zeros_(wide.weight)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self.fc.weight.dtype)

    def _latents(self, rows: Tensor, states: Tensor) -> Tensor:
        """`SiLU(W1 [h; s])` `[..., e]` of rows `[..., H]` and states `[..., g]`."""
        return F.silu(self.embed_proj[0](torch.cat([rows, states.to(rows.dtype)], dim=-1)))

    def biases(self, scored: Scored, hidden: Tensor) -> Sequence[Factor]:
        states = self.prefix_gru.along(self._embedded(scored.previous))
        latents = self._latents(hidden, states)
        corrected = torch.cat([torch.zeros_like(latents[:, :1]), latents[:, 1:]], dim=1)
        given = [corrected.flatten(0, 1)[scored.chosen].to(scored.rows.dtype)]
        wide = self.embed_proj[2]
        assert isinstance(wide, nn.Linear)
        return [Factor(given, wide.weight)]

    def summed(
        self,
        scored: Scored,
        hidden: Tensor,
        weights: Tensor,
        last: Tensor,
        target: TargetProjection,
        chunk_tokens: int,
    ) -> SummedLoss:
        """`(1 - x) loss(corrected) + x loss(uncorrected)`, x falling from 1 to 0."""
        ratio = self.config.decay_ratio
        share = max(0.0, 1 - self.trained_share / ratio) if ratio else 0.0
        found = super().summed(scored, hidden, (1 - share) * weights, last, target, chunk_tokens)
        if not share:
            return found
        uncorrected = self.compared(scored, share * weights, last, target, chunk_tokens)
        return found._replace(loss=found.loss + uncorrected.loss)

    def step_logits(self, normed: Tensor, previous: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See `BlockDraft.step_logits`."""
        state = normed.new_zeros(len(normed), self.config.gru_hidden_dim)
        for step in range(normed.shape[1]):
            rows = normed[:, step]
            state = self.prefix_gru.step(self.prefix_gru.project(self._embedded(previous(step))), state)
            logits = self.logits(rows)
            yield logits + self.embed_proj[2](self._latents(rows, state)) if step else logits

    def engine_settings(self) -> dict[str, Any]:
        return {
            "projector_type": "domino",
            "shift_label": self.config.sample_from_anchor,
            # How many proposals are not corrected; SGLang takes no other number.
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": self.config.gru_hidden_dim,
            "emb_dim": self.config.emb_dim,
        }


DRAFT = DominoDraft
