"""The target's MTP layer: what enters it, and one decoder layer as in the target's body."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.config.mtp import MtpConfig
from models.drafts.eagle3.layers import GroupedAttention, MultiHeadLatentAttention
from models.drafts.layers import GatedMLP, GatedWeights, RMSNorm
from models.drafts.mtp.experts import ExpertWeights, MixtureOfExperts
from models.drafts.products import SharedWeight, added_product, products
from models.drafts.row_functions import Embeddings, Tables


class ZeroCentredNorm(RMSNorm):
    """A norm whose stored weights are the factors less 1 (Qwen3-Next, Qwen3.5)."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    @property
    def factors(self) -> Tensor:
        return 1 + self.weight


def norm_of(config: MtpConfig, size: int) -> RMSNorm:
    """A norm as the family stores it."""
    kind = ZeroCentredNorm if config.family == "qwen" else RMSNorm
    return kind(size, config.rms_norm_eps)


class MtpWeights(NamedTuple):
    """The layer's weights for one pass, in which it runs once per step."""

    fc: SharedWeight
    """`[H, 2H]`, its columns of the embedding first."""
    attention: tuple[SharedWeight, ...]
    gate: SharedWeight | None
    o: SharedWeight
    mlp: GatedWeights | ExpertWeights


class OwnAttention(GroupedAttention):
    """Attention of the target's body: no bias of its output, and perhaps a gate.

    With a gate, `q_proj` holds the rows of a head's query and then those of its gate, head after head.
    """

    def __init__(self, config: MtpConfig, hidden_size: int):
        super().__init__(config, hidden_size, hidden_size, qk_norm=config.qk_norm)
        queries = config.num_heads * config.head_dim
        self.gated, self.heads = config.gated_attention, config.num_heads
        self.o_proj = nn.Linear(queries, hidden_size, bias=False)
        if self.gated:
            self.q_proj = nn.Linear(hidden_size, 2 * queries, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = (norm_of(config, config.head_dim) for _ in range(2))

    def _halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of `q_proj` of all queries, and of all gates."""
        query, gate = rows.unflatten(0, (self.heads, 2, -1)).unbind(1)
        return query.flatten(0, 1), gate.flatten(0, 1)

    def weights(self) -> tuple[SharedWeight, ...]:
        if not self.gated:
            return super().weights()
        query, _ = self._halves(self.q_proj.weight)
        return tuple(SharedWeight(each) for each in (query, self.k_proj.weight, self.v_proj.weight))

    def gate_weight(self) -> SharedWeight | None:
        """For one pass."""
        return SharedWeight(self._halves(self.q_proj.weight)[1]) if self.gated else None


class MtpLayer(nn.Module):
    """One full-attention decoder layer (Qwen2's, Qwen3.5's, GLM's, DeepSeek's)."""

    def __init__(self, config: MtpConfig, hidden_size: int):
        super().__init__()
        self.input_layernorm = norm_of(config, hidden_size)
        self.self_attn: OwnAttention | MultiHeadLatentAttention = (
            OwnAttention(config, hidden_size)
            if config.mla is None
            else MultiHeadLatentAttention(config, hidden_size, hidden_size)
        )
        self.post_attention_layernorm = norm_of(config, hidden_size)
        self.mlp: GatedMLP | MixtureOfExperts = (
            GatedMLP(hidden_size, config.intermediate_size)
            if config.experts is None
            else MixtureOfExperts(config.experts, hidden_size)
        )

    def weights(self, fc: SharedWeight) -> MtpWeights:
        """For one pass; `fc` `[H, 2H]` projects what enters, the embedding first."""
        own = self.self_attn
        gate = own.gate_weight() if isinstance(own, OwnAttention) else None
        return MtpWeights(fc, own.weights(), gate, SharedWeight(own.o_proj.weight), self.mlp.weights())

    def project(
        self, _embeddings: Embeddings, _tokens: Tensor, hidden: Tensor, tables: Tables, weights: MtpWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[N, heads, d]`, rotated keys and values `[N, kv_heads, d]` of rows `hidden` `[N, H]`."""
        return self.self_attn.project(self.input_layernorm(hidden), weights.attention, tables)

    def finish(self, hidden: Tensor, attended: Tensor, weights: MtpWeights) -> Tensor:
        """The layer's output `[N, H]` from its input `hidden` and what its rows attend to `[N, heads * d]`."""
        attended = self.self_attn.attended_values(attended)
        if weights.gate is not None:
            # The norm once more, in place of a tensor that is kept from before attention.
            (gate,) = products(self.input_layernorm(hidden), (weights.gate,))
            attended = attended * torch.sigmoid(gate)
        hidden = added_product(hidden, attended, weights.o)
        return weights.mlp.add_to(hidden, self.post_attention_layernorm(hidden))
