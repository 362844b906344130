"""EAGLE-3's decoder layers: Llama's, Qwen3's or DeepSeek's, of which the first reads an embedding, too."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config.eagle3 import Eagle3Config
from models.config.latent import LatentShape
from models.drafts.layers import AttentionProjections, GatedMLP, GatedWeights, RMSNorm
from models.drafts.products import SharedWeight, added_product, products
from models.drafts.rope import latent_scale
from models.drafts.row_functions import Embeddings, Tables, embedded_input, rotate


class Eagle3Weights(NamedTuple):
    """A layer's weights for one pass, in which it runs once per step."""

    attention: tuple[SharedWeight, ...]
    """What queries, keys and values are projected by."""
    o: SharedWeight
    mlp: GatedWeights


class GroupedAttention(AttentionProjections):
    """Grouped-query attention."""

    def weights(self) -> tuple[SharedWeight, ...]:
        """For one pass."""
        return tuple(SharedWeight(each.weight) for each in (self.q_proj, self.k_proj, self.v_proj))

    def project(self, x: Tensor, weights: tuple[SharedWeight, ...], tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows `[N, input_size]` (see `Eagle3Layer.project`)."""
        q, k, v = products(x, weights)
        if self.q_proj.bias is not None:
            biases = (self.q_proj.bias, self.k_proj.bias, self.v_proj.bias)
            q, k, v = (found + bias.to(found.dtype) for found, bias in zip((q, k, v), biases, strict=True))
        return self.queries(q, tables), self.keys(k, tables), self.values(v)

    def attended_values(self, attended: Tensor) -> Tensor:
        """What `o_proj` reads of `[N, heads * d]`."""
        return attended


class MultiHeadLatentAttention(nn.Module):
    """DeepSeek's attention (arXiv 2405.04434) by the names of Hugging Face's `DeepseekV3Attention`.

    Keys and values of all heads are computed from a row's latent vector. A head's d values are its rotated part and the
    rest, in this order, and values are zero-padded to d. The weights rotate neighbouring values; for a pass their rows
    are sorted so that halves are rotated, and queries are scaled by YaRN's factor of the scores.

    Args:
        config: the method's knobs, with `mla`.
        input_size: width of what queries and latent vectors are projected from.
        output_size: width of the result.
    """

    def __init__(self, config: LatentShape, input_size: int, output_size: int):
        super().__init__()
        assert config.mla is not None
        self.sizes = sizes = config.mla
        self.heads, self.scale, eps = config.num_heads, latent_scale(config.rope_scaling), config.rms_norm_eps
        queries, rank = self.heads * sizes.qk_head_dim, sizes.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(input_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, rank, bias=False)
            self.q_a_layernorm = RMSNorm(rank, eps)
            self.q_b_proj = nn.Linear(rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, eps)
        of_keys_and_values = self.heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, of_keys_and_values, bias=False)
        self.o_proj = nn.Linear(self.heads * sizes.v_head_dim, output_size, bias=False)

    def weights(self) -> tuple[SharedWeight, ...]:
        """For one pass: of queries or their latent vectors, of other latent vectors, of heads, perhaps of queries."""
        sizes, is_direct = self.sizes, self.sizes.q_lora_rank is None
        of_heads = (self.q_proj if is_direct else self.q_b_proj).weight.unflatten(0, (self.heads, -1))
        plain, rotated = of_heads.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=1)
        queries = (torch.cat([_halves(rotated), plain], dim=1) * self.scale).flatten(0, 1)
        latent, shared = self.kv_a_proj_with_mqa.weight.split([sizes.kv_lora_rank, sizes.qk_rope_head_dim])
        latents = torch.cat([latent, _halves(shared)])
        first = queries if is_direct else self.q_a_proj.weight
        found = [first, latents, self.kv_b_proj.weight, *([] if is_direct else [queries])]
        return tuple(SharedWeight(weight) for weight in found)

    def project(self, x: Tensor, weights: tuple[SharedWeight, ...], tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows `[N, input_size]` (see `Eagle3Layer.project`)."""
        sizes, (first, latents, of_heads, *of_queries) = self.sizes, weights
        q, latent = products(x, (first, latents))
        if of_queries:
            (q,) = products(self.q_a_layernorm(q), of_queries)
        latent, shared = latent.split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        (both,) = products(self.kv_a_layernorm(latent), (of_heads,))
        plain, v = both.unflatten(-1, (self.heads, -1)).split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        rotated = rotate(shared.unsqueeze(1), tables).expand(-1, self.heads, -1)
        padded = F.pad(v, (0, sizes.qk_head_dim - sizes.v_head_dim))
        return rotate(q.unflatten(-1, (self.heads, -1)), tables), torch.cat([rotated, plain], dim=-1), padded

    def attended_values(self, attended: Tensor) -> Tensor:
        """What `o_proj` reads of `[N, heads * d]`: `[N, heads * v_head_dim]`."""
        return attended.unflatten(-1, (self.heads, -1))[..., : self.sizes.v_head_dim].flatten(-2)


def _halves(rows: Tensor) -> Tensor:
    """`[..., r, in]` rows of pairs (0, 1), (2, 3) and so on: the first rows of all pairs, then the second ones."""
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


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
        self.self_attn: GroupedAttention | MultiHeadLatentAttention = (
            GroupedAttention(config, input_size, hidden_size, qk_norm=config.qk_norm)
            if config.mla is None
            else MultiHeadLatentAttention(config, input_size, hidden_size)
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size)

    def weights(self) -> Eagle3Weights:
        """For one pass."""
        own = self.self_attn
        return Eagle3Weights(own.weights(), SharedWeight(own.o_proj.weight), self.mlp.weights())

    def project(
        self, embeddings: Embeddings, tokens: Tensor, hidden: Tensor, tables: Tables, weights: Eagle3Weights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[N, heads, d]`, rotated keys and values `[N, kv_heads, d]`.

        Args:
            embeddings: read by the first layer.
            tokens: `[N]`, what the rows embed.
            hidden: `[N, h]`, what the layer before gave; of the first one, the previous step.
            tables: of the rows' positions.
            weights: the layer's.
        """
        if self.first:
            norms = self.input_layernorm.weight, self.hidden_norm.weight
            x = embedded_input(embeddings, tokens, hidden, norms, self.hidden_norm.eps)
        else:
            x = self.input_layernorm(hidden)
        return self.self_attn.project(x, weights.attention, tables)

    def finish(self, hidden: Tensor, attended: Tensor, weights: Eagle3Weights) -> Tensor:
        """The layer's output `[N, h]` from its input `hidden` and what its rows attend to `[N, heads * d]`."""
        residual = self.hidden_norm(hidden) if self.first and self.norm_before_residual else hidden
        values, bias = self.self_attn.attended_values(attended), self.self_attn.o_proj.bias
        hidden = added_product(residual, values, weights.o)
        if bias is not None:
            hidden = hidden + bias.to(hidden.dtype)
        return weights.mlp.add_to(hidden, self.post_attention_layernorm(hidden))
