"""Settings of DSpark (arXiv 2607.05147)."""

from typing import ClassVar, Literal

from pydantic import Field

from models.config.blocks import BlockConfig


class DSparkConfig(BlockConfig):
    """A block draft with a small sequential head: each proposal's logits get a bias from the token before it.

    A confidence head says how likely each proposal is to be accepted, if those before it were.
    """

    title: ClassVar[str] = "DSpark"
    engine_algorithm: ClassVar[str] = "DSPARK"
    engine_proposals: ClassVar[Literal["greedy", "drawn"]] = "drawn"
    training_only: ClassVar[frozenset[str]] = BlockConfig.training_only | {"confidence_weight"}

    method: Literal["dspark"] = Field(default="dspark", description="Draft method.")
    block_size: int = Field(
        default=7, ge=2, le=16, description="Proposals per block: the last known token's row and masks."
    )
    decay_gamma: float = Field(
        default=4.0,
        gt=0,
        le=10_000,
        description="Proposal k weighs exp(-(k - 1) / decay_gamma): 4 for a block of 7, 7 for 16.",
    )
    cross_entropy_weight: float = Field(
        default=0.1, ge=0, le=1000, description="Weight of the cross-entropy of the text's own tokens in the loss."
    )
    kl_weight: float = Field(
        default=0.0, ge=0, le=1000, description="Weight of the cross-entropy of the target's distribution."
    )
    tv_weight: float = Field(
        default=0.9,
        ge=0,
        le=1000,
        description="Weight of the L1 distance between both distributions, 2 (1 - acceptance rate).",
    )
    markov_rank: int = Field(
        default=256, ge=1, le=2**16, description="Rank of the bias conditioned on the previous token."
    )
    markov_head: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla",
        description="`vanilla`: the bias depends on the previous token alone. `gated`: on the row's hidden state, too. "
        "`rnn`: on all tokens of the block before it.",
    )
    confidence_head: bool = Field(default=True, description="Train the confidence head.")
    confidence_reads_token: bool = Field(
        default=True, description="The confidence head reads the previous token beside the row's hidden state."
    )
    confidence_weight: float = Field(
        default=1.0, gt=0, le=1000, description="Weight of the confidence head's cross-entropy in the loss."
    )

    @property
    def anchor_first(self) -> bool:
        return True

    @property
    def confident(self) -> bool:
        return self.confidence_head

    def head_parameters(self, hidden: int, target_vocabulary: int) -> int:
        tables = (target_vocabulary + self.vocabulary_size(target_vocabulary)) * self.markov_rank
        biases = {"vanilla": 0, "gated": 1, "rnn": 3}[self.markov_head] * self.markov_rank
        confidence = (self._confidence_inputs(hidden) + 1) if self.confidence_head else 0
        return tables + self._mixing(hidden) + biases + confidence

    def head_row_parameters(self, hidden: int) -> int:
        return self._mixing(hidden) + (self._confidence_inputs(hidden) if self.confidence_head else 0)

    def _mixing(self, hidden: int) -> int:
        """Weights by which the bias depends on more than the token before."""
        rank = self.markov_rank
        return {"vanilla": 0, "gated": rank * (hidden + rank), "rnn": 3 * rank * (hidden + 2 * rank)}[self.markov_head]

    def _confidence_inputs(self, hidden: int) -> int:
        return hidden + self.confidence_reads_token * self.markov_rank
