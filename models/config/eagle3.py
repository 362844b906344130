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
            frozen=head * self.shared_head,
            frozen_embeddings=embeddings * (not self.train_embeddings),
            token_parameters=fusion,
            row_parameters=layer,
            rows_per_token=self.ttt_steps,
            attention_width=queries,
            kept=self._kept(hidden, aux_count, ITEM_BYTES[precision]),
        )

    def _kept(self, hidden: int, aux_count: int, item: int) -> Kept:
        """Counted from what the functions save for the backward pass, in `item` bytes unless said otherwise."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        normed = self.fc_norm or self.norm_before_fc
        # Rotated queries, the attended values, keys and values; the log-sum-exp of every head's scores in float32.
        of_attention = (2 * queries + 2 * keys) * item + 4 * self.num_heads
        # Both normed inputs, the sum after attention, its norm, the output; perhaps the next input, its norm.
        of_hidden = (5 + self.norm_output) * hidden * item
        # Gate and up projection; the rotary tables and the factors of four norms in float32.
        of_rest = 2 * self.intermediate_size * item + 4 * self.head_dim + 16
        return Kept(
            # The fused features; a copy of the captured ones where they are not bfloat16, and where they are normed.
            token=(1 + aux_count * ((item == 4) + normed)) * hidden * item,
            row=of_hidden + of_attention + of_rest,
            # The first step's keys and values, and their gradients.
            exchanged=4 * keys * item,
            carried=(hidden + 2 * keys) * item + 8,
            step=(2 * queries + 2 * keys + hidden) * item + 4 * self.num_heads,
            inner=(2 * hidden + 6 * self.intermediate_size) * item,
        )

    def engine_arguments(self, lookahead: int) -> list[str]:
        """SGLang's arguments for a chain. SGLang counts the last known token among the draft tokens."""
        command = ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "1"]
        command += ["--speculative-num-steps", str(lookahead)]
        return [*command, "--speculative-num-draft-tokens", str(lookahead + 1)]
