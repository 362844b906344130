"""Settings of Domino (arXiv 2605.29707), as SGLang 0.5.23 reads its checkpoints."""

from typing import ClassVar, Literal

from pydantic import Field

from infra.planner.shapes import DraftShape, Precision, TargetShape
from models.config.blocks import BlockConfig


class DominoConfig(BlockConfig):
    """DFlash with a recurrent state over the tokens chosen so far, which corrects each proposal's logits."""

    title: ClassVar[str] = "Domino"
    training_only: ClassVar[frozenset[str]] = BlockConfig.training_only | {"decay_ratio"}
    engine_dtype: ClassVar[str | None] = "bfloat16"

    method: Literal["domino"] = Field(default="domino", description="Draft method.")
    sample_from_anchor: bool = Field(
        default=True,
        description="The known token's row proposes the next token, and every row the one after its own position; the "
        "last row proposes nothing. All published Domino drafts are so. False: as in DFlash.",
    )
    cross_entropy_weight: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of the cross-entropy of the text's own tokens in the loss."
    )
    kl_weight: float = Field(
        default=0.0, ge=0, le=1000, description="Weight of the cross-entropy of the target's distribution."
    )
    gru_hidden_dim: int = Field(default=1024, ge=1, le=2**16, description="Size of the recurrent state.")
    emb_dim: int = Field(default=256, ge=1, le=2**16, description="Rank of the correction.")
    decay_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the training over which the loss moves from the uncorrected logits to the corrected "
        "ones; 0: corrected ones from the start.",
    )

    @property
    def anchor_first(self) -> bool:
        return self.sample_from_anchor

    @property
    def proposals(self) -> int:
        """With the anchor first, too, engines take one token less than there are rows."""
        return self.block_size - 1

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """The draft's shape; in the first `decay_ratio` of the training the loss compares two rows of logits."""
        return super().shape(target, aux_count, precision).model_copy(update={"loss_passes": 1 + self.decay_ratio})

    def head_parameters(self, hidden: int, target_vocabulary: int) -> int:
        return self.head_row_parameters(hidden) + self.emb_dim * self.vocabulary_size(target_vocabulary)

    def head_row_parameters(self, hidden: int) -> int:
        state = self.gru_hidden_dim
        return 3 * state * (hidden + state) + self.emb_dim * (hidden + state)

    def engine_arguments(self, lookahead: int) -> list[str]:
        """By default SGLang corrects the logits of 2,048 tokens chosen for the whole block, and proposes others."""
        return [*super().engine_arguments(lookahead), "--speculative-domino-candidate-pool-size", "0"]
