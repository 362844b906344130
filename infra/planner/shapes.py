"""What a plan has to know of a target and of a draft: sizes, and the floating-point operations that follow from them.

A target's shape comes from the `config.json` of its Hugging Face folder; a draft's from its method's configuration.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from infra.planner.target_files import MODELOPT_FILE, read_target_config, with_modelopt
from infra.records.data_path import Record
from infra.refusal import Refusal

Precision = Literal["float32", "bfloat16"]
ITEM_BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2}
SCALE_SHARE = 1 / 16
"""Bytes of scales for a weight of four bits: one in fp8 for 16 weights (NVFP4)."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token")
"""Names of how many experts a token passes: of most, Gemma 4, Kimi."""
ORTHOGONALISING = 5 * (4 + 2 * 0.6)
"""FLOPs of Muon's five iterations for each weight and row of a matrix whose rows are 0.6 times its columns."""
BACKWARD = 3.0
"""Forward and backward of a matrix product against its forward: gradients of inputs and of weights."""


class TargetShape(Record):
    """A target: what its prefill computes, and what is captured of it."""

    hidden_size: int = Field(ge=1, le=2**20, description="Size of a hidden state.")
    num_layers: int = Field(ge=1, le=10_000, description="Decoder layers.")
    vocab_size: int = Field(ge=1, le=2**24, description="Tokens of the vocabulary.")
    parameters: int = Field(ge=1, le=10**15, description="All weights, which a generator's GPUs hold.")
    active_parameters: int = Field(
        ge=1,
        le=10**15,
        description="Weights used per prefilled token: without embedding, head, and experts that are not chosen.",
    )
    attention_width: int = Field(ge=1, le=2**24, description="Query heads times head size.")
    cache_width: int = Field(
        default=0,
        ge=0,
        le=2**24,
        description="Numbers that a token keeps in a layer's KV cache; 0: two per attention_width.",
    )
    attention_parameters: int = Field(
        default=0,
        ge=0,
        le=10**15,
        description="Weights of attention, of `parameters`; generator.sglang.attention_data_parallel copies them.",
    )
    latent_cache: bool = Field(
        default=False,
        description="Whether tensor parallelism leaves the cache whole on every GPU (latent attention).",
    )
    tied_head: bool = Field(default=False, description="Whether the output head is the embedding.")
    bytes_per_weight: float | None = Field(
        default=None,
        gt=0,
        le=8,
        description="Bytes of a weight of a quantized target, scales included; default: the precision's.",
    )

    def weight_bytes(self, precision: Precision, attention_copies: int = 1) -> int:
        """Bytes of all weights in an engine; `attention_copies`: how many copies of attention's weights it holds."""
        held = self.parameters + (attention_copies - 1) * self.attention_parameters
        return int(held * (self.bytes_per_weight or ITEM_BYTES[precision]))

    @property
    def cache_per_token(self) -> int:
        """Numbers that a token keeps in the KV cache of all layers."""
        return (self.cache_width or 2 * self.attention_width) * self.num_layers


class Kept(Record):
    """Bytes of a draft's forward that stay until its backward, besides the loss's own.

    A row is what passes the draft's layers: a token in one step of the training-time test, a position of a block.
    """

    token: float = 0.0
    """Per token, once."""
    row: float
    """Per row."""
    output: float = 0.0
    """Per row, from the last layer to the end of the loss."""
    exchanged: float = 0.0
    """Per token of the whole sample, on each of the ranks that share it."""
    pair: float = 0.0
    """Per row and key, where attention copies what it sees."""
    carried: float | None = None
    """Per row, of `row`: what stays where the rest is computed again (training.recompute). None: nothing can be."""
    step: float = 0.0
    """Per row of one step, while that step is computed again."""
    inner: float = 0.0
    """Additional bytes per row, for at most `RECOMPUTED_ROWS` rows."""


class DraftShape(Record):
    """A draft of one method for one target, as it is trained."""

    title: str
    parameters: int
    """Trained weights, float32 with their gradients and moments."""
    vocab_size: int
    """Tokens over which it is trained."""
    hidden_size: int | None = None
    """Size of the states that its head reads; None: the target's."""
    trains_head: bool
    frozen: int
    """Elements of heads that it keeps in float32 without training them."""
    frozen_embeddings: int = 0
    """Elements of embeddings that it keeps without training them, in the precision of the arithmetic."""
    token_parameters: int
    """Weights of matrix products that every token passes once."""
    row_parameters: int
    """Weights of matrix products that every row passes."""
    idle_parameters: int = 0
    """Weights of matrices that a row does not pass: of experts that are not chosen for it."""
    rows_per_token: int
    most_anchors: int | None = None
    """Maximum number of tokens of a sample that have rows; None: all."""
    target_per_row: bool = False
    """Whether the target's logits are formed for every row; False: once per token, for all of its rows."""
    loss_passes: float = 1.0
    """How often the draft's logits of a row are compared with the target's, on average over the training."""
    attention_width: int = 0
    """Query heads x their width x layers."""
    kept: Kept

    @property
    def matrix_parameters(self) -> int:
        """Weights of all matrices but tables."""
        return self.token_parameters + self.row_parameters + self.idle_parameters

    def rows(self, tokens: int) -> int:
        """Rows of a sample of `tokens` tokens."""
        return min(tokens, self.most_anchors or tokens) * self.rows_per_token


def read_target_shape(file: Path) -> TargetShape:
    """The shape in a target's `config.json` and the files beside it. Raises Refusal if it is incomplete."""
    if not file.is_file():
        raise Refusal(f"{file} is missing: give the target's shape by plan.target")
    tree = with_modelopt(read_target_config(file), file.with_name(MODELOPT_FILE))
    try:
        return target_shape(tree)
    except (KeyError, TypeError) as error:
        raise Refusal(
            f"{file} does not say {error}: the planner reads Llama-like configurations; give the target's shape by "
            "plan.target"
        ) from error


def target_shape(config: Mapping[str, Any]) -> TargetShape:
    """From a Hugging Face configuration: Llama-like, gated feed-forward; experts and latent attention (MLA) too.

    Norms, biases and a vision part are left out: below a thousandth of the text model's weights, or no part of it.
    KeyError names what is missing.
    """
    text = config.get("text_config") or config
    hidden, layers, vocabulary = text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]
    heads = text["num_attention_heads"]
    if text.get("kv_lora_rank"):
        attention, width = _latent_attention(text, hidden, heads)
        cached = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        head_dim = text.get("head_dim") or hidden // heads
        width = heads * head_dim
        cached = 2 * (text.get("num_key_value_heads") or heads) * head_dim
        attention = hidden * (2 * width + cached)
    stored, active = _feed_forward(text, hidden, layers)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return TargetShape(
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=vocabulary,
        parameters=layers * attention + stored + (1 if tied else 2) * vocabulary * hidden,
        active_parameters=layers * attention + active,
        attention_width=width,
        cache_width=cached,
        attention_parameters=layers * attention,
        latent_cache=bool(text.get("kv_lora_rank")),
        tied_head=bool(tied),
        bytes_per_weight=_bytes_per_weight(text.get("quantization_config") or config.get("quantization_config") or {}),
    )


def _bytes_per_weight(quantization: Mapping[str, Any]) -> float | None:
    """Of a quantized checkpoint, by its `quantization_config`; None for floats, and where the format is not known."""
    if bits := quantization.get("bits") or quantization.get("w_bit"):
        return bits / 8 + SCALE_SHARE * (bits < 8)
    if layers := quantization.get("quantized_layers"):
        # Of several precisions that of the feed-forwards, which are most of a target.
        kinds = Counter(layer["quant_algo"] for name, layer in layers.items() if ".mlp" in name or "expert" in name)
        quantization = {"quant_algo": kinds.most_common(1)[0][0]} if kinds else {}
    words = " ".join(str(quantization.get(name, "")) for name in ("quant_method", "quant_algo", "format")).lower()
    if "fp4" in words or "pack-quantized" in words:
        return 0.5 + SCALE_SHARE
    return 1.0 if "fp8" in words or "float-quantized" in words or "int-quantized" in words else None


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Weights of DeepSeek's multi-head latent attention in a layer, and the width of its products."""
    plain, rotary, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    rank, kv_rank, wide = text.get("q_lora_rank"), text["kv_lora_rank"], heads * (plain + rotary)
    queries = hidden * rank + rank * wide if rank else hidden * wide
    keys = hidden * (kv_rank + rotary) + kv_rank * heads * (plain + value)
    return queries + keys + heads * value * hidden, heads * (plain + rotary + value) // 2


def _feed_forward(text: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int]:
    """Weights of all feed-forwards that are stored, and that a token passes."""
    experts = next(
        (text[name] for name in ("n_routed_experts", "num_experts", "num_local_experts") if text.get(name)), 0
    )
    if not experts:
        dense = 3 * hidden * text["intermediate_size"] * layers
        return dense, dense
    wide = text.get("moe_intermediate_size") or text["intermediate_size"]
    # Llama 4, which names two widths, has a shared expert in any case.
    count = text.get("n_shared_experts") or int("intermediate_size_mlp" in text)
    shared = text.get("shared_expert_intermediate_size") or count * wide
    with_experts = (layers - (text.get("first_k_dense_replace") or 0)) // (text.get("interleave_moe_layer_step") or 1)
    width = text.get("intermediate_size_mlp") or text.get("intermediate_size", wide)
    dense = 3 * hidden * width * (layers - with_experts)
    router = hidden * experts
    stored = (3 * hidden * (experts * wide + shared) + router) * with_experts
    chosen = next((text[name] for name in EXPERTS_PER_TOKEN[1:] if name in text), None) or text[EXPERTS_PER_TOKEN[0]]
    active = (3 * hidden * (chosen * wide + shared) + router) * with_experts
    return dense + stored, dense + active


def prefill_flops(target: TargetShape, tokens: float, top_token: bool) -> float:
    """FLOPs of one sample through the target; through its head only where its top token is wanted everywhere.

    Two per multiply-add, without padding and norms; a causal mask leaves T / 2 keys on average.
    """
    attention = 4 * target.attention_width * target.num_layers * tokens / 2
    head = 2 * target.hidden_size * target.vocab_size if top_token else 0
    return tokens * (2 * target.active_parameters + attention + head)


def draft_flops(
    draft: DraftShape,
    target: TargetShape,
    tokens: int,
    supervised_share: float,
    whole_head: bool,
    recompute: bool = False,
) -> float:
    """Of one sample's forward, loss and backward.

    `whole_head`: the loss reads the target's logits over its whole vocabulary, which hold the draft vocabulary's.
    """
    rows = draft.rows(tokens)
    attention = 4 * draft.attention_width * tokens / 2
    again = 1 if recompute and draft.kept.carried is not None else 0
    body = (BACKWARD + again) * (2 * draft.token_parameters * tokens + rows * (2 * draft.row_parameters + attention))
    product = 2.0 * (draft.hidden_size or target.hidden_size) * draft.vocab_size
    predicted = rows * supervised_share
    loss = predicted * product * (3 if draft.trains_head else 2)
    of_target = 2.0 * target.hidden_size * (target.vocab_size if whole_head else draft.vocab_size)
    of_target *= predicted if draft.target_per_row else tokens * supervised_share
    return body + draft.loss_passes * (loss + of_target)


def muon_flops(draft: DraftShape, target: TargetShape) -> float:
    """Of Muon's step, whatever the number of its samples: matrices have about as many rows as a state is wide."""
    rows = draft.hidden_size or target.hidden_size
    return ORTHOGONALISING * rows * draft.matrix_parameters
