"""Settings of drafts that fill a block at once: DFlash and what is built on it."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from infra.config import Seed
from infra.planner.shapes import ITEM_BYTES, DraftShape, Kept, Precision, TargetShape
from infra.refusal import Refusal
from models.config.benchmark import MOST_PROPOSALS
from models.config.draft_base import LayerShape, LayerType, VocabularyChoice

ROWS_AT_ONCE = 256
"""Rows of one attention call: blocks in one call see each other's keys masked, which is wasted work."""


class BlockConfig(VocabularyChoice, LayerShape):
    """A few decoder layers over a block of one known token and masks; the target's features are keys and values.

    Draft and serving engine use the target's own head, or its rows of a draft vocabulary.
    """

    training_only: ClassVar[frozenset[str]] = frozenset(
        {"anchors", "anchor_seed", "decay_gamma", "cross_entropy_weight", "kl_weight", "tv_weight"}
    )
    shareable: ClassVar[bool] = False
    engine_algorithm: ClassVar[str] = "DFLASH"
    """SGLang's name of the method."""

    vocab_size: int | None = Field(
        default=None,
        ge=16,
        le=2**24,
        description="Size of the draft vocabulary, the most frequent tokens of the supervised text; default: all "
        "tokens. SGLang serves block drafts with all tokens only.",
    )
    block_size: int = Field(default=16, ge=2, le=17, description="Positions per block: the last known token and masks.")
    layer_types: tuple[LayerType, ...] = Field(
        default=("full_attention",) * 5,
        min_length=1,
        max_length=256,
        description="One per layer. `full_attention` sees all features and the whole block; `sliding_attention` the "
        "features of the last `sliding_window` positions and the earlier positions of the block.",
    )
    sliding_sees_ahead: bool = Field(
        default=False,
        description="Sliding layers see the later positions of the block, too, as full ones do; sliding_window must be "
        "at least block_size then.",
    )
    mask_token_id: int | None = Field(
        default=None,
        ge=0,
        le=2**24,
        description="Target token whose embedding marks the positions to propose. Default: the last token of the "
        "target's vocabulary, which is seldom a real one.",
    )
    fc_norm: bool = Field(
        default=False,
        description="RMS norm per target feature before fusion, and one per layer on the fused features (SGLang's "
        "Laguna variant). Needed where the residual stream grows a lot (Gemma).",
    )
    anchors: int = Field(default=512, ge=1, le=1_000_000, description="Blocks per sample, at random positions.")
    anchor_seed: Seed = Field(default=0, description="Seed of these positions.")
    decay_gamma: float = Field(
        default=7.0,
        gt=0,
        le=10_000,
        description="Proposal k weighs exp(-(k - 1) / decay_gamma): 7 for a block of 16, 5 for 10, 4 for 8.",
    )
    cross_entropy_weight: float = Field(
        default=0.0, ge=0, le=1000, description="Weight of the cross-entropy of the text's own tokens in the loss."
    )
    kl_weight: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of the cross-entropy of the target's distribution."
    )
    tv_weight: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="Weight of the L1 distance between both distributions, 2 (1 - acceptance rate).",
    )

    @property
    def anchor_first(self) -> bool:
        """Whether the block's first row, the known token's, proposes the next token; False: only the masks propose."""
        raise NotImplementedError

    @property
    def proposals(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - (not self.anchor_first)

    @property
    def needs_mass(self) -> bool:
        """The acceptance rate is that of the target's true probabilities."""
        return self.tv_weight > 0

    @model_validator(mode="after")
    def _has_a_loss(self) -> Self:
        if not self.cross_entropy_weight + self.kl_weight + self.tv_weight:
            raise Refusal("cross_entropy_weight, kl_weight and tv_weight are all 0: nothing would be learnt")
        return self

    @model_validator(mode="after")
    def _proposes_what_is_measured(self) -> Self:
        if self.proposals > MOST_PROPOSALS:
            raise Refusal(
                f"draft.block_size {self.block_size} makes blocks of {self.proposals} proposals, and at most "
                f"{MOST_PROPOSALS} are measured (benchmark.lookahead): lower it"
            )
        return self

    @model_validator(mode="after")
    def _sees_the_whole_block(self) -> Self:
        if not self.sliding_sees_ahead:
            return self
        if "sliding_attention" not in self.layer_types:
            raise Refusal("sliding_sees_ahead is for sliding_attention layers, and there are none: leave it out")
        if (self.sliding_window or 0) < self.block_size:
            raise Refusal(
                f"sliding_window {self.sliding_window} is less than block_size {self.block_size}: with "
                "sliding_sees_ahead engines differ in what a row sees of its block, so raise it"
            )
        return self

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """Blocks of rows at up to `anchors` tokens; the keys of all layers include the features."""
        hidden, layers, item = target.hidden_size, len(self.layer_types), ITEM_BYTES[precision]
        queries, keys = self.widths
        fusion = aux_count * hidden * hidden
        layer = 2 * queries * hidden + 2 * keys * hidden + 3 * hidden * self.intermediate_size
        norms = layers * 2 * (hidden + self.head_dim) + hidden * (2 + (aux_count if self.fc_norm else 0))
        biases = layers * (queries + 2 * keys + hidden) * self.attention_bias
        vocabulary = self.vocabulary_size(target.vocab_size)
        return DraftShape(
            title=self.title,
            parameters=fusion + layers * layer + norms + biases + self.head_parameters(hidden, target.vocab_size),
            vocab_size=vocabulary,
            trains_head=False,
            frozen=vocabulary * hidden,
            frozen_embeddings=target.vocab_size * hidden,
            token_parameters=fusion + layers * 2 * keys * hidden,
            row_parameters=layers * layer + self.head_row_parameters(hidden),
            rows_per_token=self.block_size,
            most_anchors=self.anchors,
            target_per_row=True,
            attention_width=layers * queries,
            kept=self._kept(hidden, aux_count, item),
        )

    def head_parameters(self, hidden: int, target_vocabulary: int) -> int:
        """Trained weights after the last layer."""
        return 0

    def head_row_parameters(self, hidden: int) -> int:
        """Those of them that every row passes in a matrix product, without what gives logits."""
        return 0

    def _kept(self, hidden: int, aux_count: int, item: int) -> Kept:
        """Counted from what the functions save for the backward pass; a block's rows pass the layers in float32."""
        layers, queries, keys = len(self.layer_types), *self.widths
        layer = 8 * hidden + (2 * hidden + 4 * queries + 3 * keys + 2 * self.intermediate_size) * item
        return Kept(
            token=(aux_count * hidden + 2 * hidden + layers * keys) * item,
            row=layers * layer + 8 * hidden,
            output=4 * hidden,
            pair=layers * 2 * queries * item / ROWS_AT_ONCE + len(set(self.windows)) * item,
        )

    def lookaheads(self, most: int) -> tuple[int, ...]:
        """Whole blocks only, whatever `most` is."""
        return (0, self.proposals)

    def engine_arguments(self, lookahead: int) -> list[str]:
        """For a whole block, and the known token before its proposals.

        Raises Refusal for any other lookahead: to SGLang it would be another model.
        """
        if lookahead != self.proposals:
            raise Refusal(
                f"benchmark.lookahead={lookahead}: SGLang proposes whole blocks of a {self.title} draft, so set it to "
                f"{self.proposals}, or leave serving out (benchmark.served_concurrency=[])"
            )
        count = str(lookahead + 1)
        return ["--speculative-algorithm", self.engine_algorithm, "--speculative-num-draft-tokens", count]
