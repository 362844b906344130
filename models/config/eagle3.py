"""Settings of EAGLE-3 (arXiv 2503.01840) and of EAGLE-3.1's norms (arXiv 2605.09992)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from infra.planner.shapes import ITEM_BYTES, DraftShape, Kept, Precision, TargetShape
from infra.refusal import Refusal
from models.config.draft_base import LOSS_FIELDS, LayerShape, LossChoice, VocabularyChoice


class Eagle3Config(LossChoice, VocabularyChoice, LayerShape):
    """One decoder layer over the next token's embedding and the fused target features.

    EAGLE-3.1 is `fc_norm` and `norm_output` together.
    """

    title: ClassVar[str] = "EAGLE-3"
    training_only: ClassVar[frozenset[str]] = LOSS_FIELDS | {"ttt_steps", "ttt_decay", "ttt_weights"}
    adaptive: ClassVar[bool] = True

    method: Literal["eagle3"] = Field(default="eagle3", description="Draft method.")
    fc_norm: bool = Field(
        default=False,
        description="RMS norm per target feature before fusion. Needed where the residual stream grows a lot (Gemma).",
    )
    norm_before_fc: bool = Field(default=False, description="One RMS norm over all target features before fusion.")
    norm_output: bool = Field(default=False, description="Feed back the normed output, not the raw one (EAGLE-3.1).")
    shared_head: bool = Field(default=False, description="Use the target's frozen output head instead of training one.")
    train_embeddings: bool = Field(
        default=False,
        description="Train a copy of the target's token embeddings with the draft. SGLang serves EAGLE-3 drafts with "
        "the target's embeddings, so such a draft is measured by the reference decoder only.",
    )
    ttt_steps: int = Field(default=7, ge=1, le=16, description="Unrolled steps of the training-time test.")
    ttt_decay: float = Field(default=0.8, gt=0, le=1, description="Loss weight of step j is ttt_decay ** j.")
    ttt_weights: tuple[Annotated[float, Field(ge=0, le=1_000_000)], ...] | None = Field(
        default=None, description="Loss weight of each step; default: by ttt_decay."
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Eagle3Config":
        if self.fc_norm and self.norm_before_fc:
            raise Refusal("fc_norm and norm_before_fc both norm the target features: set one of them")
        if self.ttt_weights is not None and (len(self.ttt_weights) != self.ttt_steps or not any(self.ttt_weights)):
            raise Refusal(
                f"ttt_weights {list(self.ttt_weights)}: give one weight for each of the {self.ttt_steps} ttt_steps, "
                "not all of them 0"
            )
        return self

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Loss weight of each step of the training-time test."""
        return self.ttt_weights or tuple(self.ttt_decay**step for step in range(self.ttt_steps))

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """One decoder layer that reads twice the hidden size and runs `ttt_steps` times."""
        hidden, vocabulary = target.hidden_size, self.vocabulary_size(target.vocab_size)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        fusion = aux_count * hidden * hidden
        layer = 2 * hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * self.intermediate_size
        norms = hidden * (4 + (aux_count if self.fc_norm or self.norm_before_fc else 0))
        embeddings, head = target.vocab_size * hidden, vocabulary * hidden
        trained = head * (not self.shared_head) + embeddings * self.train_embeddings
        return DraftShape(
            title=self.title,
            parameters=fusion + layer + norms + trained,
            vocab_size=vocabulary,
            whole_vocabulary=vocabulary == target.vocab_size,
            trains_head=not self.shared_head,
            frozen=embeddings * (not self.train_embeddings) + head * self.shared_head,
            token_parameters=fusion,
            row_parameters=layer,
            rows_per_token=self.ttt_steps,
            attention_width=queries,
            kept=self._kept(hidden, aux_count, ITEM_BYTES[precision]),
        )

    def _kept(self, hidden: int, aux_count: int, item: int) -> Kept:
        """Counted from the graph's saved tensors, with products in `item` bytes and norms in float32."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # A norm keeps its input and its unscaled result; the results of two norms are concatenated.
        of_hidden = (28 + 2 * item if item == 4 else 28 + 8 * item) * hidden
        # Rotated queries, the attended values, keys and values; the log-sum-exp of every head's scores.
        of_attention = (2 * queries + 2 * keys) * item + 4 * self.num_heads
        of_layer = 4 * self.intermediate_size * item + 4 * self.head_dim + 12
        return Kept(
            token=aux_count * hidden * item + (hidden * 4 if item == 4 else 0),
            row=of_hidden + of_attention + of_layer,
            # The first step's keys and values, and their gradients.
            exchanged=4 * keys * item,
            carried=4 * hidden + 2 * keys * item,
            step=8 * hidden + (3 * queries + 2 * keys) * item,
            inner=20 * hidden + 4 * self.intermediate_size * item,
        )

    def engine_arguments(self, lookahead: int) -> list[str]:
        """SGLang's arguments for a chain. SGLang counts the last known token among the draft tokens."""
        command = ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "1"]
        command += ["--speculative-num-steps", str(lookahead)]
        return [*command, "--speculative-num-draft-tokens", str(lookahead + 1)]
