"""Settings of MTP: the target's own next-n layer, trained further (arXiv 2412.19437, 2509.18362)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from infra.planner.shapes import ITEM_BYTES, DraftShape, Kept, Precision, TargetShape
from infra.refusal import Refusal
from models.config.draft_base import LOSS_FIELDS, LayerShape, LossChoice

MtpFamily = Literal["mimo", "qwen", "deepseek"]
OF_MODEL_TYPE: dict[str, MtpFamily] = {
    "mimo": "mimo",
    "qwen3_5": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_next": "qwen",
    "glm4_moe": "deepseek",
    "deepseek_v3": "deepseek",
}
"""Model types of targets whose layout of an MTP layer is known."""


class MtpConfig(LossChoice, LayerShape):
    """The target's own MTP layer. Training starts from the target's weights of it, and an export replaces these."""

    title: ClassVar[str] = "MTP"
    training_only: ClassVar[frozenset[str]] = LOSS_FIELDS | {"ttt_steps", "ttt_decay", "ttt_weights", "objective"}
    shareable: ClassVar[bool] = False
    reads_layers: ClassVar[bool] = False
    adaptive: ClassVar[bool] = True
    norm_output: ClassVar[bool] = True
    """The next step reads the output after the final norm."""

    method: Literal["mtp"] = Field(default="mtp", description="Draft method.")
    family: MtpFamily = Field(
        description="How the target's checkpoint names the layer and what it computes; from the target's model type. "
        "`mimo`: MiMo-7B. `qwen`: Qwen3-Next and Qwen3.5. `deepseek`: DeepSeek-V3 and GLM-4.5."
    )
    layer_index: int = Field(
        default=0,
        ge=0,
        lt=10_000,
        description="`deepseek`: number of the layer in the checkpoint; the target's number of layers.",
    )
    attention_bias: bool = Field(default=False, description="Biases of queries, keys and values; the target's choice.")
    qk_norm: bool = Field(
        default=False, description="RMS norms of queries and keys, head by head; the target's choice."
    )
    gated_attention: bool = Field(
        default=False, description="A gate for what each head attends to (Qwen3.5); the target's choice."
    )
    objective: Literal["training_time_test", "fastmtp"] = Field(
        default="training_time_test",
        description="`training_time_test`: `loss` along chains, as while decoding. `fastmtp`: cross-entropy of the "
        "text's own tokens over recursive passes of the layer, step j weighted by 0.6 ** j (arXiv 2509.18362).",
    )
    ttt_steps: int = Field(default=3, ge=1, le=16, description="Steps of the layer in training.")
    ttt_decay: float = Field(
        default=0.8, gt=0, le=1, description="`training_time_test`: loss weight of step j is ttt_decay ** j."
    )
    ttt_weights: tuple[Annotated[float, Field(ge=0, le=1_000_000)], ...] | None = Field(
        default=None, description="Loss weight of each step; default: by the objective."
    )

    @model_validator(mode="after")
    def _is_one_full_layer(self) -> "MtpConfig":
        if self.layer_types != ("full_attention",):
            raise Refusal("draft.layer_types: an MTP layer is one full_attention layer, leave it out")
        if self.gated_attention and self.attention_bias:
            raise Refusal("draft.gated_attention: gates have no bias here, so attention_bias must be false")
        if self.ttt_weights is not None and (len(self.ttt_weights) != self.ttt_steps or not any(self.ttt_weights)):
            raise Refusal(
                f"ttt_weights {list(self.ttt_weights)}: give one weight for each of the {self.ttt_steps} ttt_steps, "
                "not all of them 0"
            )
        return self

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Loss weight of each step; those of FastMTP's objective sum to 1."""
        if self.ttt_weights is not None:
            return self.ttt_weights
        if self.objective == "training_time_test":
            return tuple(self.ttt_decay**step for step in range(self.ttt_steps))
        raw = [FASTMTP_DECAY**step for step in range(self.ttt_steps)]
        return tuple(weight / sum(raw) for weight in raw)

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """One layer and the projection before it, which run `ttt_steps` times; all tables are the target's."""
        hidden, vocabulary = target.hidden_size, target.vocab_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (queries * (1 + self.gated_attention) + 2 * keys) + queries * hidden
        matrices = 2 * hidden * hidden + attention + 3 * hidden * self.intermediate_size
        vectors = 5 * hidden + 2 * self.head_dim * self.qk_norm + (queries + 2 * keys) * self.attention_bias
        return DraftShape(
            title=self.title,
            parameters=matrices + vectors,
            vocab_size=vocabulary,
            whole_vocabulary=True,
            trains_head=False,
            frozen=vocabulary * hidden,
            frozen_embeddings=vocabulary * hidden,
            token_parameters=0,
            row_parameters=matrices,
            rows_per_token=self.ttt_steps,
            attention_width=queries,
            kept=self._kept(hidden, queries, keys, ITEM_BYTES[precision]),
        )

    def _kept(self, hidden: int, queries: int, keys: int, item: int) -> Kept:
        """Counted from what the functions save for the backward pass, in `item` bytes unless said otherwise."""
        # Rotated queries, the attended values, keys and values; the log-sum-exp of every head's scores in float32.
        of_attention = (2 * queries + 2 * keys) * item + 4 * self.num_heads
        of_attention += ((queries + keys) * item + 4 * (self.num_heads + self.num_kv_heads)) * self.qk_norm
        of_attention += 2 * queries * item * self.gated_attention
        # Both inputs normed, what enters the layer, its norm, the sum after attention, its norm, output, normed output.
        of_hidden = 8 * hidden * item
        of_rest = 2 * self.intermediate_size * item + 4 * self.rotary_dim + 20
        return Kept(
            token=hidden * item if item == 4 else 0,
            row=of_hidden + of_attention + of_rest,
            carried=(hidden + 2 * keys) * item + 8,
            step=(2 * queries + 2 * keys + 4 * hidden) * item + 4 * self.num_heads,
            inner=(2 * hidden + 6 * self.intermediate_size) * item,
        )

    def engine_arguments(self, lookahead: int) -> list[str]:
        return self.tree_arguments(lookahead, 1, lookahead)

    def tree_arguments(self, depth: int, topk: int, tokens: int) -> list[str]:
        """See `MethodConfig.tree_arguments`. SGLang counts the last known token among the draft tokens."""
        command = ["--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", str(topk)]
        return [*command, "--speculative-num-steps", str(depth), "--speculative-num-draft-tokens", str(tokens + 1)]


FASTMTP_DECAY = 0.6


def own_layer(text: Mapping[str, Any]) -> dict[str, Any]:
    """What a target's configuration says of its MTP layer, beside the sizes that all its layers have.

    Raises Refusal for a target that has none, or one that cannot be trained here.
    """
    kind = str(text.get("model_type", ""))
    other = "choose another draft.method"
    if kind not in OF_MODEL_TYPE:
        known = ", ".join(OF_MODEL_TYPE)
        raise Refusal(f"draft.method=mtp: no MTP layer of model type {kind!r} is known ({known} are): {other}")
    if text.get("kv_lora_rank"):
        raise Refusal(
            f"draft.method=mtp: the MTP layer of {kind} has latent attention, which is not supported: {other}"
        )
    if any(text.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts")):
        raise Refusal(
            f"draft.method=mtp: the MTP layer of this {kind} is a mixture of experts, which is not supported: {other}"
        )
    if (count := text.get("num_nextn_predict_layers") or 1) > 1:
        raise Refusal(f"draft.method=mtp: this {kind} has {count} MTP layers, and one can be trained: {other}")
    family, rope = OF_MODEL_TYPE[kind], text.get("rope_parameters") or {}
    rotated = text.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    return {
        "family": family,
        "layer_index": text["num_hidden_layers"] if family == "deepseek" else 0,
        "attention_bias": bool(text.get("attention_bias", family == "mimo")),
        "qk_norm": family == "qwen" or bool(text.get("use_qk_norm", False)),
        "gated_attention": family == "qwen" and bool(text.get("attn_output_gate", True)),
        "partial_rotary_factor": float(rotated or (0.25 if family == "qwen" else 1.0)),
    }
