"""An MTP layer written out row by row, from its stored weights alone."""

import torch
from torch import Tensor

from models.drafts.mtp.module import MtpDraft


def mtp_logits(draft: MtpDraft, tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """`[V]` logits of every step of a chain from one row; rows up to it read the target's states."""
    config, weights, found = draft.config, dict(draft.named_parameters()), list[Tensor]()
    keys, values, fed_back = list[Tensor](), list[Tensor](), torch.empty(0)

    def norm(x: Tensor, name: str) -> Tensor:
        factors = weights[f"{name}.weight"] + (config.family == "qwen")
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * factors

    def projected(x: Tensor, name: str) -> Tensor:
        bias = weights.get(f"layers.0.self_attn.{name}.bias", 0)
        return (weights[f"layers.0.self_attn.{name}.weight"] @ x + bias).view(-1, config.head_dim)

    def placed(heads: Tensor, name: str, position: int) -> Tensor:
        if config.qk_norm:
            heads = norm(heads, f"layers.0.self_attn.{name}")
        half, turned = config.rotary_dim // 2, heads.clone()
        for pair in range(half):
            angle = torch.tensor(position * config.rope_theta ** (-2 * pair / config.rotary_dim), dtype=torch.float64)
            cos, sin = angle.cos().to(heads), angle.sin().to(heads)
            one, other = heads[:, pair], heads[:, half + pair]
            turned[:, pair], turned[:, half + pair] = one * cos - other * sin, other * cos + one * sin
        return turned

    for at in range(row + steps):
        feature = aux[at, -draft.hidden_size :] if at <= row else fed_back
        embedded = draft.embed_tokens.weight[tokens[at + 1]] * (at > 0 or config.family != "mimo")
        parts = [norm(embedded, "embedding_norm"), norm(feature, "hidden_norm")]
        entered = weights["fc.weight"] @ torch.cat(parts[::-1] if config.family == "mimo" else parts)
        x = norm(entered, "layers.0.input_layernorm")
        query, gate = projected(x, "q_proj"), None
        if config.gated_attention:
            query, gate = query.view(config.num_heads, 2, -1).unbind(1)
        keys.append(placed(projected(x, "k_proj"), "k_norm", at))
        values.append(projected(x, "v_proj"))
        shared = config.num_heads // config.num_kv_heads
        attended = []
        for head, one in enumerate(placed(query, "q_norm", at)):
            scores = torch.stack([key[head // shared] @ one for key in keys]) / config.head_dim**0.5
            attended.append(torch.stack([value[head // shared] for value in values]).T @ scores.softmax(0))
        joined = torch.cat(attended)
        if gate is not None:
            joined = joined / (1 + (-gate.flatten()).exp())
        out = entered + weights["layers.0.self_attn.o_proj.weight"] @ joined
        x = norm(out, "layers.0.post_attention_layernorm")
        up, opened = (weights[f"layers.0.mlp.{name}_proj.weight"] @ x for name in ("up", "gate"))
        out = out + weights["layers.0.mlp.down_proj.weight"] @ (opened / (1 + (-opened).exp()) * up)
        fed_back = norm(out, "norm")
        if at >= row:
            found.append(draft.lm_head.weight @ fed_back)
    return found
