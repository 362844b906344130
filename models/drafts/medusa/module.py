"""Medusa heads (arXiv 2401.10774): every proposed position has a head of its own over one target feature.

Head k reads the target's feature of position i and predicts token i + 2 + k: `lm_head(x + silu(W_k x))`, with W_k = 0
at first. Two things differ from the paper. x is not the target's last hidden state after its final norm, but the last
chunk of `aux`, that is the output of the highest captured layer, after a norm of the draft's own. And the heads share
one projection onto the draft vocabulary, which starts as the target head's rows; the paper has one for each head.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config.medusa import MedusaConfig
from models.drafts.base import Draft, DraftLoss, PackedSamples, TargetProjection
from models.drafts.batched_proposer import Choice, DraftProposer, PackedTexts, Turn
from models.drafts.chains import chain_loss
from models.drafts.layers import RMSNorm
from models.drafts.trees import NO_PROPOSAL, Tree
from models.drafts.vocabulary import DraftVocabulary


class Head(nn.Module):
    """Residual layers, which start as the identity."""

    def __init__(self, layers: int, hidden_size: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(layers))
        for layer in self.layers:
            nn.init.zeros_(layer.get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDraft(Draft):
    """Medusa heads for one target (arguments as for every draft; the embedding says only how wide the target is)."""

    def __init__(
        self, config: MedusaConfig, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__(config, vocabulary, aux_layer_ids)
        self.hidden_size = embedding.shape[1]
        self.norm = RMSNorm(self.hidden_size, config.rms_norm_eps)
        self.blocks = nn.ModuleList(Head(config.layers, self.hidden_size) for _ in range(config.heads))
        self.lm_head = nn.Linear(self.hidden_size, len(vocabulary), bias=False)

    @property
    def positions(self) -> int:
        return self.config.heads

    @torch.no_grad()
    def start_from(self, head: Tensor) -> None:
        """The projection starts as the target head's rows of the draft vocabulary."""
        self.lm_head.weight.copy_(head[self.target_ids])

    def outputs(self, aux: Tensor) -> list[Tensor]:
        """Hidden states `[N, H]` of every head, from target features `[N, K*H]`."""
        x = self.norm(aux[:, -self.hidden_size :])
        return [block(x) for block in self.blocks]

    def loss(self, batch: PackedSamples, target: TargetProjection, total: int, chunk_tokens: int) -> DraftLoss:
        """Divergence from the target, head by head (see Draft.loss)."""
        return chain_loss(self, self.outputs(batch.aux), batch, target, total, chunk_tokens)

    @torch.no_grad()
    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        """Proposals `[T - first, lookahead]` from the positions of one sequence (see RolloutSource)."""
        proposals = tokens.new_full((len(aux) - first, lookahead), NO_PROPOSAL)
        for step, output in enumerate(self.outputs(aux[first:])[:lookahead]):
            proposals[:, step] = self.target_ids[self.lm_head(output).argmax(-1)]
        return proposals

    def logits_along(self, texts: PackedTexts, lookahead: int, rows: Tensor) -> Iterator[Tensor]:
        """See `Draft.logits_along`; heads do not see what is proposed."""
        return (self.lm_head(output) for output in self.outputs(texts.aux[rows])[:lookahead])

    def proposers(self, count: int) -> "MedusaProposer":
        return MedusaProposer(self)


class MedusaProposer(DraftProposer):
    """Proposes by the newest positions' features, for any rows (see `Proposer`); it keeps nothing of them."""

    def __init__(self, draft: MedusaDraft):
        self.draft = draft

    @torch.no_grad()
    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`; nothing is proposed beyond the last head."""
        draft = self.draft
        choice = Choice(list(turns.values()), draft.target_ids, draft.vocabulary.target_size, draft.positions)
        newest = torch.stack([turn.aux[-1] for turn in turns.values()])
        for output in draft.outputs(newest)[: choice.longest]:
            choice.next(draft.lm_head(output))
        return dict(zip(turns, choice.chains(), strict=True))

    def only(self, rows: Sequence[int]) -> None:
        """Nothing is stored per row."""


DRAFT = MedusaDraft
