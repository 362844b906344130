"""Multi-head latent attention in a draft's layers: its sizes, and what follows from them."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from infra.config import Count, StrictConfig
from infra.refusal import Refusal
from models.config.draft_base import LayerShape


class LatentAttention(StrictConfig):
    """Sizes of multi-head latent attention (MLA, arXiv 2405.04434); defaults: those of DeepSeek-V3, R1 and Kimi-K2."""

    q_lora_rank: Count | None = Field(
        default=1536,
        description="Size of the latent vector that a row's queries come from; null: they are projected directly, "
        "which SGLang does not serve.",
    )
    kv_lora_rank: Count = Field(default=512, description="Size of the latent vector of a row's keys and values.")
    qk_nope_head_dim: Count = Field(default=128, description="Part of a head's queries and keys without position.")
    qk_rope_head_dim: Annotated[int, Field(ge=2, le=2048, multiple_of=2)] = Field(
        default=64, description="Rotated part of a head's queries and keys; all heads share that of a key."
    )
    v_head_dim: Count = Field(
        default=128, description="Size of a head's values, at most qk_nope_head_dim + qk_rope_head_dim."
    )

    @property
    def qk_head_dim(self) -> int:
        """Size of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @model_validator(mode="after")
    def _values_fit(self) -> "LatentAttention":
        if self.v_head_dim > self.qk_head_dim:
            raise Refusal(
                f"v_head_dim {self.v_head_dim} exceeds qk_nope_head_dim + qk_rope_head_dim = {self.qk_head_dim}: "
                "attention pads values to the size of keys, so lower it"
            )
        return self

    def weights(self, width: int, hidden: int, heads: int) -> int:
        """Of a layer whose attention reads `width` values and gives `hidden`."""
        queries = heads * self.qk_head_dim
        first = (self.q_lora_rank or queries) + self.kv_lora_rank + self.qk_rope_head_dim
        second = (self.q_lora_rank or 0) * queries
        second += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return width * first + second + heads * self.v_head_dim * hidden

    def kept(self, heads: int, item: int) -> int:
        """Bytes of a row that stay for the backward pass, beside queries, keys, values and what is attended to."""
        # Latent vectors before and after their norms, the norms' factors; the attended values without their padding.
        latent = 2 * (self.q_lora_rank or 0) + 2 * self.kv_lora_rank + self.qk_rope_head_dim
        unpadded = heads * self.v_head_dim * (self.v_head_dim < self.qk_head_dim)
        return (latent + unpadded) * item + 4 * (1 + (self.q_lora_rank is not None))


class LatentShape(LayerShape):
    """Settings of methods whose layers may have such attention."""

    mla: LatentAttention | None = Field(
        default=None,
        description="Attention of DeepSeek-V3 and Kimi-K2 (MLA) in place of grouped queries; `{}`: with the target's "
        "sizes, or theirs. num_kv_heads and head_dim follow from it.",
    )
    qk_norm: bool = Field(default=False, description="RMS norms of queries and keys, head by head.")

    @model_validator(mode="before")
    @classmethod
    def _sizes_of_latent_heads(cls, tree: Any) -> Any:
        """With `mla`, sizes that grouped queries would need follow from others."""
        mla = tree.get("mla") if isinstance(tree, dict) else None
        if mla is None:
            return tree
        mla = mla.model_dump() if isinstance(mla, LatentAttention) else mla
        names, fields = ("qk_nope_head_dim", "qk_rope_head_dim"), LatentAttention.model_fields
        sizes = [mla.get(name, fields[name].default) for name in names] if isinstance(mla, dict) else []
        if not all(isinstance(size, int) for size in sizes):
            return tree
        return {"num_kv_heads": tree.get("num_heads"), "head_dim": sum(sizes)} | tree

    @model_validator(mode="after")
    def _fits_latent_attention(self) -> Self:
        if self.mla is None:
            return self
        scaling, wanted = self.rope_scaling, (self.num_heads, self.mla.qk_head_dim)
        if (self.num_kv_heads, self.head_dim) != wanted:
            raise Refusal(
                f"num_kv_heads {self.num_kv_heads} and head_dim {self.head_dim} are {wanted[0]} and {wanted[1]} with "
                "draft.mla: leave them out"
            )
        foreign = {
            "attention_bias": self.attention_bias,
            "qk_norm": self.qk_norm,
            "partial_rotary_factor": self.partial_rotary_factor != 1,
            "sliding_attention layers": "sliding_attention" in self.layer_types,
        }
        if names := [name for name, is_set in foreign.items() if is_set]:
            raise Refusal(f"draft.mla has no {', '.join(names)}: leave them out, or leave mla out")
        if scaling is not None and (scaling.rope_type != "yarn" or not scaling.truncate):
            raise Refusal(
                f"rope_scaling of rope_type {scaling.rope_type}, truncate {scaling.truncate}: engines take every "
                "scaling of an MLA layer for YaRN with rounded bounds, so set rope_type yarn and leave truncate out"
            )
        return self

    def attention_kept(self, item: int) -> int:
        """Bytes of a row that stay for the backward pass of a layer's attention, in numbers of `item` bytes."""
        queries, keys = self.widths
        # Rotated queries, the attended values, keys and values; the log-sum-exp of every head's scores in float32.
        kept = (2 * queries + 2 * keys) * item + 4 * self.num_heads
        # Queries and keys before their norms, and the factors of these.
        kept += ((queries + keys) * item + 4 * (self.num_heads + self.num_kv_heads)) * self.qk_norm
        return kept if self.mla is None else kept + self.mla.kept(self.num_heads, item)

    @property
    def rotary_dim(self) -> int:
        return super().rotary_dim if self.mla is None else self.mla.qk_rope_head_dim

    def engine_layers(self, hidden_size: int, vocab_size: int) -> dict[str, Any]:
        """See `LayerShape.engine_layers`. head_dim is left out: for MLA, Hugging Face means the rotated part by it."""
        found = super().engine_layers(hidden_size, vocab_size)
        if self.mla is None:
            return found
        return {name: value for name, value in found.items() if name != "head_dim"} | self.mla.model_dump()
