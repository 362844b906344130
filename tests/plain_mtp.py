"""An MTP layer written out row by row, from its stored weights alone."""

import torch
from torch import Tensor

from models.config.experts import Experts
from models.drafts.mtp.module import MtpDraft

ATTENTION, MLP = "layers.0.self_attn.", "layers.0.mlp."


class PlainLayer:
    """The layer's weights, and one row at a time."""

    def __init__(self, draft: MtpDraft):
        self.config, self.weights = draft.config, draft.state_dict(keep_vars=True)
        self.keys, self.values = list[Tensor](), list[Tensor]()

    def norm(self, x: Tensor, name: str) -> Tensor:
        factors = self.weights[f"{name}.weight"] + (self.config.family == "qwen")
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * factors

    def product(self, x: Tensor, name: str) -> Tensor:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0)

    def turned(self, heads: Tensor, position: int, pairs: list[tuple[int, int]]) -> Tensor:
        turned, size = heads.clone(), self.config.rotary_dim
        for number, (first, second) in enumerate(pairs):
            angle = torch.tensor(position * self.config.rope_theta ** (-2 * number / size), dtype=torch.float64)
            cos, sin = angle.cos().to(heads), angle.sin().to(heads)
            one, other = heads[:, first], heads[:, second]
            turned[:, first], turned[:, second] = one * cos - other * sin, other * cos + one * sin
        return turned

    def grouped(self, x: Tensor, position: int) -> tuple[Tensor, Tensor | None]:
        """Queries `[heads, d]` and what gates them; the row's key and value are added to the others."""
        config, half = self.config, self.config.rotary_dim // 2
        query, gate = self.product(x, ATTENTION + "q_proj").view(-1, config.head_dim), None
        if config.gated_attention:
            query, gate = query.view(config.num_heads, 2, -1).unbind(1)
        key = self.product(x, ATTENTION + "k_proj").view(-1, config.head_dim)
        if config.qk_norm:
            query, key = (self.norm(heads, f"{ATTENTION}{name}_norm") for heads, name in ((query, "q"), (key, "k")))
        pairs = [(pair, half + pair) for pair in range(half)]
        self.keys.append(self.turned(key, position, pairs))
        self.values.append(self.product(x, ATTENTION + "v_proj").view(-1, config.head_dim))
        return self.turned(query, position, pairs), gate

    def latent(self, x: Tensor, position: int) -> tuple[Tensor, None]:
        """The same by DeepSeek's attention."""
        config, sizes = self.config, self.config.mla
        assert sizes is not None
        read = x if sizes.q_lora_rank is None else self.norm(
            self.product(x, ATTENTION + "q_a_proj"), ATTENTION + "q_a_layernorm"
        )  # fmt: skip
        name = "q_proj" if sizes.q_lora_rank is None else "q_b_proj"
        query = self.product(read, ATTENTION + name).view(config.num_heads, -1)
        both = self.product(x, ATTENTION + "kv_a_proj_with_mqa")
        shared = both[sizes.kv_lora_rank :][None]
        state = self.norm(both[: sizes.kv_lora_rank], ATTENTION + "kv_a_layernorm")
        heads = self.product(state, ATTENTION + "kv_b_proj").view(config.num_heads, -1)
        plain, pairs = sizes.qk_nope_head_dim, [(at, at + 1) for at in range(0, sizes.qk_rope_head_dim, 2)]
        shared = self.turned(shared, position, pairs).expand(config.num_heads, -1)
        self.keys.append(torch.cat([heads[:, :plain], shared], dim=1))
        self.values.append(heads[:, plain:])
        return torch.cat([query[:, :plain], self.turned(query[:, plain:], position, pairs)], dim=1), None

    def attention(self, x: Tensor, position: int) -> Tensor:
        config = self.config
        query, gate = self.grouped(x, position) if config.mla is None else self.latent(x, position)
        shared, attended = config.num_heads // config.num_kv_heads, []
        for head, one in enumerate(query):
            scores = torch.stack([key[head // shared] @ one for key in self.keys]) / config.head_dim**0.5
            attended.append(torch.stack([value[head // shared] for value in self.values]).T @ scores.softmax(0))
        joined = torch.cat(attended)
        if gate is not None:
            joined = joined / (1 + (-gate.flatten()).exp())
        return self.product(joined, ATTENTION + "o_proj")

    def gated(self, x: Tensor, name: str) -> Tensor:
        up, opened = (self.product(x, f"{name}.{kind}_proj") for kind in ("up", "gate"))
        return self.product(opened / (1 + (-opened).exp()) * up, f"{name}.down_proj")

    def feed_forward(self, x: Tensor) -> Tensor:
        experts = self.config.experts
        if experts is None:
            return self.gated(x, MLP[:-1])
        found = torch.zeros_like(x)
        for number, factor in self.chosen(experts, x):
            gates, ups = self.weights[f"{MLP}experts.gate_up_proj"][number].chunk(2)
            opened = gates @ x
            active = opened / (1 + (-opened).exp()) * (ups @ x)
            found = found + factor * (self.weights[f"{MLP}experts.down_proj"][number] @ active)
        if experts.shared_size:
            shared = self.gated(x, f"{MLP}shared_expert")
            found = (
                found
                + (torch.sigmoid(self.product(x, f"{MLP}shared_expert_gate")) if experts.gates_shared else 1) * shared
            )
        return found

    def chosen(self, experts: Experts, x: Tensor) -> list[tuple[int, Tensor]]:
        """Numbers and factors of a row's experts."""
        logits = self.product(x, f"{MLP}gate")
        if experts.scoring == "softmax":
            scores = logits.exp() / logits.exp().sum()
            choice = scores.tolist()
        else:
            scores = 1 / (1 + (-logits).exp())
            choice = (scores + self.weights[f"{MLP}gate.e_score_correction_bias"]).tolist()
        size = experts.count // experts.groups
        groups = [range(start, start + size) for start in range(0, experts.count, size)]
        groups.sort(key=lambda group: -sum(sorted((choice[one] for one in group), reverse=True)[:2]))
        allowed = sorted(
            (one for group in groups[: experts.groups_per_token] for one in group), key=lambda one: -choice[one]
        )
        numbers = allowed[: experts.per_token]
        whole = sum(scores[one] for one in numbers) if experts.normed else 1
        return [(one, scores[one] / whole * experts.scaling) for one in numbers]


def mtp_logits(draft: MtpDraft, tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """`[V]` logits of every step of a chain from one row; rows up to it read the target's states."""
    layer, found, fed_back = PlainLayer(draft), list[Tensor](), torch.empty(0)
    is_mimo = draft.config.family == "mimo"
    for at in range(row + steps):
        feature = aux[at, -draft.hidden_size :] if at <= row else fed_back
        embedded = draft.embed_tokens.weight[tokens[at + 1]] * (at > 0 or not is_mimo)
        parts = [layer.norm(embedded, "embedding_norm"), layer.norm(feature, "hidden_norm")]
        entered = layer.product(torch.cat(parts[::-1] if is_mimo else parts), "fc")
        out = entered + layer.attention(layer.norm(entered, "layers.0.input_layernorm"), at)
        out = out + layer.feed_forward(layer.norm(out, "layers.0.post_attention_layernorm"))
        fed_back = layer.norm(out, "norm")
        if at >= row:
            found.append(draft.lm_head.weight @ fed_back)
    return found
