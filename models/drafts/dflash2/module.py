"""DFlash 2 (Inco AI and z-lab, 2026): DFlash with convolutions inside the block and a candidate selector.

The likeliest tokens of each position are candidates. The selector adds to a candidate's logit a score of it and the
token before it, given the row: `<A[before] * P h, B[candidate]>`. The draft's distribution lies on candidates alone.
How the authors train is not published. The loss is that of `speculators`: DFlash's over all tokens, and a cross-entropy
among the candidates, to which the text's own token is added.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.config.dflash2 import DFlash2Config
from models.drafts.base import TargetProjection
from models.drafts.blocks.module import BlockDraft, Scored
from models.drafts.dflash2.layers import ConvolvedLayer
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import SummedLoss

ABSENT_LOGIT = float("-inf")
"""Of tokens that are no candidates."""


class CandidateSelector(nn.Module):
    """Scores of a candidate after a token; at the start all are 0."""

    def __init__(self, hidden_size: int, vocabulary: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, previous: Tensor, rows: Tensor, candidates: Tensor) -> Tensor:
        """Scores `[n, k]` of `candidates` `[n, k]` after `previous` `[n]` (target ids), at rows `[n, H]`."""
        before = self.predecessor_codebook[previous] * self.hidden_projection(rows)
        return (self.successor_codebook[candidates] * before.unsqueeze(1)).sum(-1)


class DFlash2Draft(BlockDraft):
    """A DFlash 2 draft for one target; see `BlockDraft`."""

    config: DFlash2Config
    engine_class = "DFlash2DraftModel"
    token_tables = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")

    def __init__(
        self, config: DFlash2Config, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__(config, embedding, vocabulary, aux_layer_ids)
        count, hidden = embedding.shape
        self.candidate_selector = CandidateSelector(hidden, count, config.selector_rank)
        self.candidates = min(config.selector_top_k, len(vocabulary))

    def make_layer(self, hidden_size: int) -> ConvolvedLayer:
        return ConvolvedLayer(self.config, hidden_size)

    def step_logits(self, normed: Tensor, previous: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See `BlockDraft.step_logits`; minus infinity for tokens that are no candidates."""
        for step in range(normed.shape[1]):
            rows = normed[:, step]
            logits = self.logits(rows)
            best, places = logits.topk(self.candidates)
            scored = best + self.candidate_selector(previous(step), rows, self.target_ids[places])
            yield torch.full_like(logits, ABSENT_LOGIT).scatter(1, places, scored)

    def summed(
        self,
        scored: Scored,
        hidden: Tensor,
        weights: Tensor,
        last: Tensor,
        target: TargetProjection,
        chunk_tokens: int,
    ) -> SummedLoss:
        """DFlash's loss, and the selector's; a proposal is what the selector chooses."""
        found = super().summed(scored, hidden, weights, last, target, chunk_tokens)
        previous = scored.previous.flatten()[scored.chosen]
        own = weights * (scored.labels >= 0)
        losses, chosen = [found.loss], list[Tensor]()
        for start in range(0, len(scored.rows), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            given = (scored.rows[part], previous[part], scored.labels[part].clamp(min=0), own[part], target.rows)
            # The head's rows of all candidates would stay until the backward pass.
            loss, best = checkpoint(self._selected, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[misc]
            losses.append(self.config.selector_weight * loss)
            chosen.append(best)
        correct = torch.cat(chosen).unsqueeze(1) == found.best.unsqueeze(1) if chosen else found.correct
        return found._replace(loss=torch.stack(losses).sum(), correct=correct)

    def _selected(
        self, rows: Tensor, previous: Tensor, labels: Tensor, weights: Tensor, head: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted cross-entropy among candidates, and what the selector chooses of those that decoding has `[n]`.

        Where the text's own token is no candidate, it takes the place of the weakest one.
        """
        with torch.no_grad():
            places = (rows.to(head.dtype) @ head.T).topk(self.candidates).indices
            missing = ~(places == labels.unsqueeze(1)).any(1)
            weakest = torch.arange(self.candidates, device=rows.device) == self.candidates - 1
            trained = torch.where(missing.unsqueeze(1) & weakest, labels.unsqueeze(1), places)
            chosen = self._scores(rows, previous, places, head).argmax(1)
            best = places.gather(1, chosen.unsqueeze(1)).squeeze(1)
        scores = self._scores(rows, previous, trained, head)
        place = (trained == labels.unsqueeze(1)).long().argmax(1)
        return (weights * F.cross_entropy(scores, place, reduction="none")).sum(), best

    def _scores(self, rows: Tensor, previous: Tensor, places: Tensor, head: Tensor) -> Tensor:
        """`[n, k]` in float32 at least: logits of `places` `[n, k]` (draft ids) with the selector's scores."""
        unary = (head[places] * rows.to(head.dtype).unsqueeze(1)).sum(-1)
        added = self.candidate_selector(previous, rows, self.target_ids[places])
        return unary.to(torch.promote_types(torch.float32, unary.dtype)) + added

    def engine_settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "conv_kernel_size": config.conv_kernel_size,
            "conv_group_size": config.conv_group_size,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_top_k,
        }


DRAFT = DFlash2Draft
