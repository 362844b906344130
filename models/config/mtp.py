"""Settings of MTP: the target's own next-n layer, trained further (arXiv 2412.19437, 2509.18362)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from infra.planner.shapes import ITEM_BYTES, DraftShape, Kept, Precision, TargetShape
from infra.refusal import Refusal
from models.config.axes import AxialShape
from models.config.draft_base import LOSS_FIELDS, STEP_FIELDS, LossChoice, UnrolledSteps
from models.config.experts import Experts, target_experts
from models.config.latent import LatentAttention

MtpFamily = Literal["mimo", "qwen", "deepseek"]
OF_MODEL_TYPE: dict[str, MtpFamily] = {
    "mimo": "mimo",
    "qwen3_5": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_5_moe": "qwen",
    "qwen3_5_moe_text": "qwen",
    "qwen3_next": "qwen",
    "glm4_moe": "deepseek",
    "glm4_moe_lite": "deepseek",
    "deepseek_v3": "deepseek",
}
"""Model types of targets whose layout of an MTP layer is known."""


class MtpConfig(UnrolledSteps, LossChoice, AxialShape):
    """The target's own MTP layer. Training starts from the target's weights of it, and an export replaces these."""

    title: ClassVar[str] = "MTP"
    engine_algorithm: ClassVar[str] = "NEXTN"
    reads_embeddings: ClassVar[bool] = True
    training_only: ClassVar[frozenset[str]] = LOSS_FIELDS | STEP_FIELDS | {"objective"}
    shareable: ClassVar[bool] = False
    reads_layers: ClassVar[bool] = False
    adaptive: ClassVar[bool] = True
    norm_output: ClassVar[bool] = True
    """The next step reads the output after the final norm."""

    method: Literal["mtp"] = Field(default="mtp", description="Draft method.")
    family: MtpFamily = Field(
        description="How the target's checkpoint names the layer and what it computes. Default in a recipe file: "
        "by its model type. `mimo`: MiMo-7B. `qwen`: Qwen3-Next and Qwen3.5. `deepseek`: DeepSeek-V3, GLM-4.5 and "
        "later."
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
    mla: LatentAttention | None = Field(
        default=None, description="Attention of DeepSeek-V3 in place of grouped queries; the target's choice."
    )
    experts: Experts | None = Field(
        default=None, description="A mixture of experts as feed-forward; the target's choice. null: a dense one."
    )
    objective: Literal["training_time_test", "fastmtp"] = Field(
        default="training_time_test",
        description="`training_time_test`: `loss` along chains, as while decoding. `fastmtp`: cross-entropy of the "
        "text's own tokens over recursive passes of the layer, step j weighted by 0.6 ** j (arXiv 2509.18362).",
    )
    ttt_steps: int = Field(default=3, ge=1, le=16, description="Steps of the layer in training.")

    @model_validator(mode="after")
    def _is_one_full_layer(self) -> "MtpConfig":
        if self.layer_types != ("full_attention",):
            raise Refusal("draft.layer_types: an MTP layer is one full_attention layer, leave it out")
        if self.gated_attention and self.attention_bias:
            raise Refusal("draft.gated_attention: gates have no bias here, so attention_bias must be false")
        if self.gated_attention and self.mla is not None:
            raise Refusal("draft.gated_attention: latent attention has no gates, so set one of the two")
        return self

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Loss weight of each step; those of FastMTP's objective sum to 1."""
        if self.ttt_weights is not None or self.objective == "training_time_test":
            return super().step_weights
        raw = [FASTMTP_DECAY**step for step in range(self.ttt_steps)]
        return tuple(weight / sum(raw) for weight in raw)

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """One layer and the projection before it, which run `ttt_steps` times; all tables are the target's."""
        hidden, vocabulary = target.hidden_size, target.vocab_size
        queries, keys = self.widths
        attention = hidden * (queries * (1 + self.gated_attention) + 2 * keys) + queries * hidden
        norms = 5 * hidden + 2 * self.head_dim * self.qk_norm
        if self.mla is not None:
            attention = self.mla.weights(hidden, hidden, self.num_heads)
            norms += self.mla.kv_lora_rank + (self.mla.q_lora_rank or 0)
        experts = self.experts
        passed = 3 * hidden * self.intermediate_size if experts is None else experts.chosen_weights(hidden)
        idle = 0 if experts is None else experts.idle_weights(hidden)
        matrices = 2 * hidden * hidden + attention + passed
        vectors = norms + (queries + 2 * keys) * self.attention_bias
        return DraftShape(
            title=self.title,
            parameters=matrices + idle + vectors,
            vocab_size=vocabulary,
            trains_head=False,
            frozen=vocabulary * hidden + (0 if experts is None else experts.frozen),
            frozen_embeddings=vocabulary * hidden,
            token_parameters=0,
            row_parameters=matrices,
            idle_parameters=idle,
            rows_per_token=self.ttt_steps,
            attention_width=queries,
            kept=self._kept(hidden, ITEM_BYTES[precision]),
        )

    def _kept(self, hidden: int, item: int) -> Kept:
        """Counted from what the functions save for the backward pass, in `item` bytes unless said otherwise."""
        experts, (queries, keys) = self.experts, self.widths
        of_attention = self.attention_kept(item) + 2 * queries * item * self.gated_attention
        # Both inputs normed, what enters the layer, its norm, the sum after attention, its norm, output, normed output.
        of_hidden = 8 * hidden * item
        of_rest = 2 * self.intermediate_size * item if experts is None else experts.kept(hidden, item)
        of_rest += 4 * self.rotary_dim + 20
        return Kept(
            token=hidden * item if item == 4 else 0,
            row=of_hidden + of_attention + of_rest,
            carried=(hidden + 2 * keys) * item + 8,
            step=(2 * queries + 2 * keys + 4 * hidden) * item + 4 * self.num_heads,
            inner=2 * hidden * item
            + (6 * self.intermediate_size * item if experts is None else experts.inner(hidden, item)),
        )


FASTMTP_DECAY = 0.6


def own_layer(text: Mapping[str, Any]) -> dict[str, Any]:
    """What a target's configuration says of its MTP layer, beside the sizes that all its layers have.

    Raises Refusal for a target that has none, or one that cannot be trained here; KeyError for a size that it does not
    say.
    """
    kind = str(text.get("model_type", ""))
    other = "choose another draft.method"
    if kind not in OF_MODEL_TYPE:
        known = ", ".join(OF_MODEL_TYPE)
        raise Refusal(f"draft.method=mtp: no MTP layer of model type {kind!r} is known ({known} are): {other}")
    if (count := text.get("num_nextn_predict_layers", text.get("mtp_num_hidden_layers", 1))) != 1:
        raise Refusal(f"draft.method=mtp: this {kind} has {count or 'no'} MTP layers, and one can be trained: {other}")
    family, rope = OF_MODEL_TYPE[kind], text.get("rope_parameters") or {}
    rotated = text.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    found = {
        "family": family,
        "layer_index": text["num_hidden_layers"] if family == "deepseek" else 0,
        "attention_bias": bool(text.get("attention_bias", family == "mimo")),
        "qk_norm": family == "qwen" or bool(text.get("use_qk_norm", False)),
        "gated_attention": family == "qwen" and bool(text.get("attn_output_gate", True)),
        "partial_rotary_factor": float(rotated or (0.25 if family == "qwen" else 1.0)),
    }
    if section := rope.get("mrope_section"):
        found |= {"mrope_section": list(section), "mrope_interleaved": bool(rope.get("mrope_interleaved"))}
    if text.get("kv_lora_rank"):
        sizes = LatentAttention.model_validate({name: text[name] for name in LatentAttention.model_fields})
        found |= {"mla": sizes.model_dump(), "num_kv_heads": text["num_attention_heads"], "head_dim": sizes.qk_head_dim}
        found |= {"partial_rotary_factor": 1.0}
    experts = target_experts(text, kind)
    return found if experts is None else found | {"experts": experts}
