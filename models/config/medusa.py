"""Settings of Medusa heads (arXiv 2401.10774)."""

from typing import ClassVar, Literal

from pydantic import Field

from infra.planner.shapes import ITEM_BYTES, DraftShape, Kept, Precision, TargetShape
from models.config.draft_base import LOSS_FIELDS, LossChoice, VocabularyChoice


class MedusaConfig(LossChoice, VocabularyChoice):
    """Heads over the highest target layer of `target.aux_layer_ids`, which should be the target's last."""

    title: ClassVar[str] = "Medusa"
    training_only: ClassVar[frozenset[str]] = LOSS_FIELDS | {"head_decay"}

    method: Literal["medusa"] = Field(default="medusa", description="Draft method.")
    heads: int = Field(default=4, ge=1, le=16, description="Number of heads; each proposes one token.")
    layers: int = Field(default=1, ge=1, le=4, description="Residual layers per head.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, le=1, description="Epsilon of the RMS norm before the heads.")
    head_decay: float = Field(default=0.8, gt=0, le=1, description="Loss weight of head k is head_decay ** k.")

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Loss weight of each head."""
        return tuple(self.head_decay**head for head in range(self.heads))

    def layers_read(self, captured: tuple[int, ...]) -> tuple[int, ...]:
        return captured[-1:]

    def lookaheads(self, most: int) -> tuple[int, ...]:
        """At most one proposal per head."""
        return super().lookaheads(min(most, self.heads))

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """Parallel heads over one normed feature."""
        hidden, vocabulary = target.hidden_size, self.vocabulary_size(target.vocab_size)
        head, item = self.layers * hidden * hidden, ITEM_BYTES[precision]
        return DraftShape(
            title=self.title,
            parameters=self.heads * head + hidden + vocabulary * hidden,
            vocab_size=vocabulary,
            trains_head=True,
            frozen=0,
            token_parameters=0,
            row_parameters=head,
            rows_per_token=self.heads,
            kept=Kept(
                token=4 * hidden + (hidden * item if item < 4 else 0),
                row=self.layers * 2 * hidden * item,
                output=4 * hidden,
            ),
        )
