"""EAGLE-3's decoder layers: Llama's or Qwen3's, of which the first reads an embedding beside the hidden state."""

from typing import NamedTuple

from torch import Tensor, nn

from models.config.eagle3 import Eagle3Config
from models.drafts.layers import AttentionProjections, GatedMLP, GatedWeights, RMSNorm
from models.drafts.products import SharedWeight, added_product, products
from models.drafts.row_functions import Tables, embedded_input


class Eagle3Weights(NamedTuple):
    """A layer's weights for one pass, in which it runs once per step."""

    q: SharedWeight
    k: SharedWeight
    v: SharedWeight
    o: SharedWeight
    mlp: GatedWeights


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one reads the embeddings beside the hidden states.

    Args:
        config: the method's knobs.
        hidden_size: of the draft.
        first: whether it is the first one.
    """

    def __init__(self, config: Eagle3Config, hidden_size: int, *, first: bool):
        super().__init__()
        self.first, self.norm_before_residual = first, config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        if first:
            self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        input_size = 2 * hidden_size if first else hidden_size
        self.self_attn = AttentionProjections(config, input_size, hidden_size, qk_norm=config.qk_norm)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size)

    def weights(self) -> Eagle3Weights:
        """For one pass."""
        own = self.self_attn
        q, k, v, o = (SharedWeight(x.weight) for x in (own.q_proj, own.k_proj, own.v_proj, own.o_proj))
        return Eagle3Weights(q, k, v, o, self.mlp.weights())

    def project(
        self, table: Tensor, tokens: Tensor, hidden: Tensor, tables: Tables, weights: Eagle3Weights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[N, heads, d]`, rotated keys and values `[N, kv_heads, d]`.

        Args:
            table: `[V, h]` embeddings, read by the first layer.
            tokens: `[N]`, what the rows embed.
            hidden: `[N, h]`, what the layer before gave; of the first one, the previous step.
            tables: of the rows' positions.
            weights: the layer's.
        """
        own = self.self_attn
        if self.first:
            norms = self.input_layernorm.weight, self.hidden_norm.weight
            x = embedded_input(table, tokens, hidden, norms, self.hidden_norm.eps)
        else:
            x = self.input_layernorm(hidden)
        q, k, v = products(x, weights[:3])
        if own.q_proj.bias is not None:
            biases = (own.q_proj.bias, own.k_proj.bias, own.v_proj.bias)
            q, k, v = (found + bias.to(found.dtype) for found, bias in zip((q, k, v), biases, strict=True))
        return own.queries(q, tables), own.keys(k, tables), own.values(v)

    def finish(self, hidden: Tensor, attended: Tensor, weights: Eagle3Weights) -> Tensor:
        """The layer's output `[N, h]` from its input `hidden` and what its rows attend to `[N, heads * d]`."""
        residual = self.hidden_norm(hidden) if self.first and self.norm_before_residual else hidden
        hidden, bias = added_product(residual, attended, weights.o), self.self_attn.o_proj.bias
        if bias is not None:
            hidden = hidden + bias.to(hidden.dtype)
        return weights.mlp.add_to(hidden, self.post_attention_layernorm(hidden))
