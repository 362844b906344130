"""Settings of EAGLE-3 (arXiv 2503.01840), of EAGLE-3.1's norms (arXiv 2605.09992) and of published variants."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from infra.planner.shapes import ITEM_BYTES, DraftShape, Kept, Precision, TargetShape
from infra.refusal import Refusal
from models.config.axes import AxialShape
from models.config.draft_base import LOSS_FIELDS, STEP_FIELDS, LossChoice, UnrolledSteps, VocabularyChoice


class Eagle3Config(UnrolledSteps, LossChoice, VocabularyChoice, AxialShape):
    """Decoder layers, usually one, over the next token's embedding and the fused target features.

    EAGLE-3.1 is `fc_norm` and `norm_output` together.
    """

    title: ClassVar[str] = "EAGLE-3"
    engine_algorithm: ClassVar[str] = "EAGLE3"
    reads_embeddings: ClassVar[bool] = True
    training_only: ClassVar[frozenset[str]] = LOSS_FIELDS | STEP_FIELDS
    adaptive: ClassVar[bool] = True

    method: Literal["eagle3"] = Field(default="eagle3", description="Draft method.")
    hidden_size: int | None = Field(
        default=None,
        ge=8,
        le=2**20,
        description="Size of the draft's hidden states; default: the target's. A draft of another size has embeddings "
        "and a head of its own, which are trained.",
    )
    qk_norm: bool = Field(
        default=False, description="RMS norms of queries and keys, head by head (Qwen3). SGLang does not serve it."
    )
    norm_before_residual: bool = Field(
        default=False,
        description="The first layer adds its output to the normed hidden state, not to the raw one (the default of "
        "`speculators`). SGLang does not serve it.",
    )
    fc_bias: bool = Field(
        default=False, description="A bias in the fusion of the target features. No engine serves it with the rest."
    )
    fc_norm: bool = Field(
        default=False,
        description="RMS norm per target feature before fusion. Needed where the residual stream grows a lot (Gemma).",
    )
    norm_before_fc: bool = Field(default=False, description="One RMS norm over all target features before fusion.")
    norm_output: bool = Field(default=False, description="Feed back the normed output, not the raw one (EAGLE-3.1).")
    shared_head: bool = Field(default=False, description="Use the target's frozen output head instead of training one.")
    train_embeddings: bool = Field(
        default=False,
        description="Train a copy of the target's token embeddings with the draft. SGLang puts the target's in place "
        "of embeddings of the same size, so such a draft is measured by the reference decoder only.",
    )

    @property
    def obstacle_to_images(self) -> str:
        """See `MethodConfig`: an image's embeddings are in the target's space, and have its size."""
        own = self.train_embeddings or self.hidden_size is not None
        remedy = "leave draft.train_embeddings and draft.hidden_size out, or data.images"
        return f"a draft with embeddings of its own cannot read the target's embeddings of an image: {remedy}" * own

    @model_validator(mode="after")
    def _consistent(self) -> "Eagle3Config":
        if self.fc_norm and self.norm_before_fc:
            raise Refusal("fc_norm and norm_before_fc both norm the target features: set one of them")
        if self.hidden_size is not None and self.shared_head:
            raise Refusal(
                "shared_head is the target's head, which only reads states of its own size: leave hidden_size out"
            )
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) <= self.ttt_steps:
            raise Refusal(
                f"draft.sliding_window {self.sliding_window} must exceed ttt_steps {self.ttt_steps}: a step sees its "
                "own chain whole"
            )
        return self

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """Decoder layers, the first of which reads twice the hidden size, that run `ttt_steps` times."""
        hidden, vocabulary = self.hidden_size or target.hidden_size, self.vocabulary_size(target.vocab_size)
        own_tables = self.train_embeddings or hidden != target.hidden_size
        layers = len(self.layer_types)
        fusion = aux_count * target.hidden_size * hidden
        attention = self._attention_weights(2 * hidden, hidden) + (layers - 1) * self._attention_weights(hidden, hidden)
        matrices = attention + layers * 3 * hidden * self.intermediate_size
        embeddings, head = target.vocab_size * hidden, vocabulary * hidden
        trained = head * (not self.shared_head) + embeddings * own_tables
        return DraftShape(
            title=self.title,
            parameters=fusion + matrices + self._vectors(hidden, target.hidden_size, aux_count) + trained,
            vocab_size=vocabulary,
            hidden_size=hidden,
            trains_head=not self.shared_head,
            frozen=head * self.shared_head,
            frozen_embeddings=embeddings * (not own_tables),
            token_parameters=fusion,
            row_parameters=matrices,
            rows_per_token=self.ttt_steps,
            attention_width=layers * self.widths[0],
            kept=self._kept(hidden, target.hidden_size, aux_count, ITEM_BYTES[precision]),
        )

    def _attention_weights(self, width: int, hidden: int) -> int:
        """Of a layer that reads `width` values and gives `hidden`."""
        if self.mla is not None:
            return self.mla.weights(width, hidden, self.num_heads)
        queries, keys = self.widths
        return width * (queries + 2 * keys) + queries * hidden

    def _vectors(self, hidden: int, target_hidden: int, aux_count: int) -> int:
        """Elements of norms and biases."""
        layers, queries, keys = len(self.layer_types), *self.widths
        norms = hidden * (2 + 2 * layers) + target_hidden * aux_count * (self.fc_norm or self.norm_before_fc)
        norms += 2 * layers * self.head_dim * self.qk_norm
        if self.mla is not None:
            norms += layers * (self.mla.kv_lora_rank + (self.mla.q_lora_rank or 0))
        return norms + layers * (queries + 2 * keys + hidden) * self.attention_bias + hidden * self.fc_bias

    def _kept(self, hidden: int, target_hidden: int, aux_count: int, item: int) -> Kept:
        """Counted from what the functions save for the backward pass, in `item` bytes unless said otherwise."""
        layers, queries, keys = len(self.layer_types), *self.widths
        normed = self.fc_norm or self.norm_before_fc
        # The normed input, the sum after attention, its norm, the output.
        of_hidden = 4 * hidden * item
        # Gate and up projection; the rotary tables and the factors of norms in float32.
        of_rest = 2 * self.intermediate_size * item + 4 * self.rotary_dim + 8
        # The first layer's other input, normed; perhaps the next step's input, its norm; the factors of two norms.
        of_step = (1 + self.norm_output) * hidden * item + 8
        return Kept(
            # The fused features; a copy of the captured ones where they are not bfloat16, and where they are normed.
            token=(hidden + aux_count * ((item == 4) + normed) * target_hidden) * item,
            row=layers * (of_hidden + self.attention_kept(item) + of_rest) + of_step,
            # The first step's keys and values, and their gradients.
            exchanged=4 * keys * item * layers,
            carried=(hidden + 2 * keys * layers) * item + 8,
            step=layers * ((2 * queries + 2 * keys + hidden) * item + 4 * self.num_heads),
            inner=(2 * hidden + 6 * self.intermediate_size) * item,
        )

    def tree_arguments(self, depth: int, topk: int, tokens: int) -> list[str]:
        command, window = super().tree_arguments(depth, topk, tokens), self.windows[0]
        # SGLang counts the keys before a row's own.
        return command if window is None else [*command, "--speculative-draft-window-size", str(window - 1)]
