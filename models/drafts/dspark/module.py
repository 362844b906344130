"""DSpark (arXiv 2607.05147): DFlash's backbone, anchor first, and a small head that makes its proposals sequential.

Proposal k has the logits U_k + B(x_{k-1}): those of its row, and a bias of low rank by the token proposed before it.
The block's rows are computed once; what is sequential is the bias alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config.dspark import DSparkConfig
from models.drafts.base import PackedSamples
from models.drafts.blocks.module import BlockDraft, Scored
from models.drafts.dspark.heads import MARKOV_HEADS, ConfidenceHead
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import Factor
from models.losses.position_weights import decay_weights


class DSparkDraft(BlockDraft):
    """A DSpark draft for one target; see `BlockDraft`."""

    config: DSparkConfig
    engine_class = "Qwen3DSparkModel"
    token_tables = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")

    def __init__(
        self, config: DSparkConfig, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__(config, embedding, vocabulary, aux_layer_ids)
        count, hidden = embedding.shape
        self.markov_head = MARKOV_HEADS[config.markov_head](config, count, len(vocabulary), hidden)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(hidden, config.markov_rank if config.confidence_reads_token else 0)

    def anchors(self, batch: PackedSamples, positions: Tensor) -> Tensor:
        """The known token is the target's own as well, as whenever an engine drafts."""
        return positions[batch.loss_mask[positions]]

    def weights(self, scored: Scored, head: Tensor, chunk_tokens: int) -> Tensor:
        """In sum 1 for a whole block, so that the loss is near the authors' weighted mean over all proposals.

        They divide by the step's sum of weights, which ends of supervised text make smaller.
        """
        found = decay_weights(self.positions, self.config.decay_gamma, scored.there.device)
        return (found / found.sum()).expand(scored.there.shape)

    def biases(self, scored: Scored, hidden: Tensor) -> Sequence[Factor]:
        latents = self.markov_head.along(scored.previous, hidden).flatten(0, 1)[scored.chosen]
        return [Factor([latents.to(scored.rows.dtype)], self.markov_head.markov_w2.weight)]

    def further_loss(self, scored: Scored, weights: Tensor, acceptance: Tensor) -> Tensor | None:
        """Cross-entropy of the confidence head's acceptance rates and those that the draft has now.

        Its gradients reach the backbone and the tokens' embeddings.
        """
        config = self.config
        if not config.confidence_head:
            return None
        logits = self._confidence(scored.rows, scored.previous.flatten()[scored.chosen])
        told = F.binary_cross_entropy_with_logits(logits.to(acceptance.dtype), acceptance, reduction="none")
        return config.confidence_weight * (weights * told).sum()

    def _confidence(self, rows: Tensor, previous: Tensor) -> Tensor:
        """Logits `[...]` of acceptance rates, of rows `[..., H]` and the tokens before them `[...]`."""
        embedded = self.markov_head.embed(previous) if self.config.confidence_reads_token else None
        return self.confidence_head(rows, embedded)

    def step_logits(self, normed: Tensor, previous: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See `BlockDraft.step_logits`."""
        state = None
        for step in range(normed.shape[1]):
            rows = normed[:, step]
            latent, state = self.markov_head.step(previous(step), rows, state)
            yield self.logits(rows) + self.markov_head.markov_w2(latent)

    def confidences(self, normed: Tensor, previous: Sequence[Tensor]) -> Tensor | None:
        if not self.config.confidence_head or not previous:
            return None
        return self._confidence(normed, torch.stack(list(previous), dim=1))

    def engine_config(self) -> dict[str, Any] | None:
        """SGLang checks what is nested and builds from what is not; so do forks and converters in any mixture."""
        settings = super().engine_config()
        return settings and settings | settings["dflash_config"]

    def engine_settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "sample_from_anchor": True,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_reads_token,
        }


DRAFT = DSparkDraft
