"""Published drafts read and run as plainly as can be: files by their own names, one row after another, no cache.

Written from the layouts' own code (EAGLE's cnets.py, SpecForge, speculators, DFlash's model.py, DeepSeek-V3's
model.py), with nothing of ours.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Tensors = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class PlainLayer:
    """A decoder layer's tensors, by the names in the file."""

    ahead = False
    """Whether its window reaches as far ahead as back."""

    def __init__(self, tensors: Tensors, prefix: str, layer: dict[str, Any], window: int | None):
        self.tensors, self.prefix, self.window = tensors, prefix, window
        self.eps, heads = layer.get("rms_norm_eps", 1e-6), layer["num_attention_heads"]
        self.head_dim = layer.get("head_dim") or layer["hidden_size"] // heads
        self.group = heads // layer.get("num_key_value_heads", heads)
        self.partial = int(self.head_dim * layer.get("partial_rotary_factor", 1.0))
        rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
        kind, theta = rope.get("rope_type", rope.get("type", "default")), layer.get("rope_theta", 10_000.0)
        theta = rope.setdefault("rope_theta", theta)
        if kind == "default":
            self.frequencies, self.scale = theta ** -(torch.arange(0, self.partial, 2) / self.partial), 1.0
        else:
            config = LlamaConfig(head_dim=self.head_dim, rope_parameters=rope | {"rope_type": kind})
            self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{self.prefix}{name}")

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{self.prefix}self_attn.{name}.weight"], self.get(f"self_attn.{name}.bias"))

    def normed(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.tensors[f"{self.prefix}{name}.weight"], self.eps)

    def turned(self, x: Tensor, position: int) -> Tensor:
        half = len(self.frequencies)
        turns = torch.polar(torch.full((half,), self.scale), position * self.frequencies)
        out = torch.complex(x[:, :half], x[:, half : 2 * half]) * turns
        return torch.cat([out.real, out.imag, x[:, 2 * half :]], dim=-1)

    def heads(self, x: Tensor, name: str, position: int) -> Tensor:
        found = self.project(x, f"{name}_proj").view(-1, self.head_dim)
        weight = self.get(f"self_attn.{name}_norm.weight")
        found = found if weight is None else norm(found, weight, self.eps)
        return found if name == "v" else self.turned(found, position)

    def key_value(self, x: Tensor, position: int) -> tuple[Tensor, Tensor, int]:
        return self.heads(x, "k", position), self.heads(x, "v", position), position

    def attend(self, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor, int]]) -> Tensor:
        q = self.heads(x, "q", position)
        if self.window is not None:
            seen = [one for one in seen if abs(position - one[2]) < self.window and (self.ahead or one[2] <= position)]
        keys = torch.stack([one[0] for one in seen]).repeat_interleave(self.group, 1)
        values = torch.stack([one[1] for one in seen]).repeat_interleave(self.group, 1)
        weights = (torch.einsum("hd,nhd->hn", q, keys) / self.head_dim**0.5).softmax(-1)
        return self.project(torch.einsum("hn,nhd->hd", weights, values).flatten(), "o_proj")

    def mlp(self, hidden: Tensor) -> Tensor:
        x = self.normed(hidden, "post_attention_layernorm")
        gate, up, down = (self.tensors[f"{self.prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + (silu(x @ gate.T) * (x @ up.T)) @ down.T


class PlainLatentLayer(PlainLayer):
    """DeepSeek's attention as its authors write it: scores of parts without and with position, summed.

    A row's key is its latent vector and its rotated part, its value the latent vector.
    """

    def __init__(self, tensors: Tensors, prefix: str, layer: dict[str, Any], window: int | None):
        self.rank, self.rotary = layer["kv_lora_rank"], layer["qk_rope_head_dim"]
        self.plain, self.count = layer["qk_nope_head_dim"], layer["num_attention_heads"]
        super().__init__(tensors, prefix, layer | {"head_dim": self.rotary}, window)
        scaling = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
        self.softmax = (self.plain + self.rotary) ** -0.5
        if scaling.get("mscale_all_dim"):
            self.softmax *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2

    def turned(self, x: Tensor, position: int) -> Tensor:
        turns = torch.polar(torch.full_like(self.frequencies, self.scale), position * self.frequencies)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)

    def key_value(self, x: Tensor, position: int) -> tuple[Tensor, Tensor, int]:
        both = self.project(x, "kv_a_proj_with_mqa")
        latent = self.normed(both[: self.rank], "self_attn.kv_a_layernorm")
        return self.turned(both[None, self.rank :], position)[0], latent, position

    def attend(self, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor, int]]) -> Tensor:
        if self.get("self_attn.q_a_proj.weight") is None:
            q = self.project(x, "q_proj")
        else:
            q = self.project(self.normed(self.project(x, "q_a_proj"), "self_attn.q_a_layernorm"), "q_b_proj")
        q = q.view(self.count, -1)
        rotated, latents = torch.stack([one[0] for one in seen]), torch.stack([one[1] for one in seen])
        of_heads = self.tensors[f"{self.prefix}self_attn.kv_b_proj.weight"].view(self.count, -1, self.rank)
        keys = torch.einsum("hdr,nr->hnd", of_heads[:, : self.plain], latents)
        values = torch.einsum("hdr,nr->hnd", of_heads[:, self.plain :], latents)
        scores = torch.einsum("hd,hnd->hn", q[:, : self.plain], keys)
        scores = scores + self.turned(q[:, self.plain :], position) @ rotated.T
        weights = (scores * self.softmax).softmax(-1)
        return self.project(torch.einsum("hn,hnd->hd", weights, values).flatten(), "o_proj")


def windows(layer: dict[str, Any]) -> list[int | None]:
    types = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    return [layer["sliding_window"] if kind == "sliding_attention" else None for kind in types]


def target_ids(tensors: Tensors, count: int) -> Tensor:
    return tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else torch.arange(count)


class PlainEagle3:
    """Args: the `config.json`, the tensors of all files, the target's embeddings and head."""

    fixed: Tensor | None = None
    """What is stored and not trained."""

    def __init__(self, settings: dict[str, Any], tensors: Tensors, embedding: Tensor, head: Tensor):
        self.settings, self.tensors = settings, {name.removeprefix("model."): x for name, x in tensors.items()}
        layer = settings.get("transformer_layer_config", settings)
        self.eps, kinds = layer.get("rms_norm_eps", 1e-6), windows(layer)
        first = "midlayer." if "midlayer.mlp.up_proj.weight" in self.tensors else "layers.0."
        prefixes = [first, *(f"layers.{index}." for index in range(1, len(kinds)))]
        kind_of_layer = PlainLatentLayer if "kv_lora_rank" in layer else PlainLayer
        self.layers = [
            kind_of_layer(self.tensors, *one, layer, kind) for one, kind in zip(zip(prefixes), kinds, strict=True)
        ]
        # A later layer's first norm has another name in SGLang's layout.
        self.inner = "hidden_norm" if "layers.1.hidden_norm.weight" in self.tensors else "input_layernorm"
        self.embedding, self.ids = (
            self.tensors.get("embed_tokens.weight", embedding),
            target_ids(tensors, len(embedding)),
        )
        self.head = self.tensors.get("lm_head.weight", head[self.ids])

    def fuse(self, aux: Tensor) -> Tensor:
        eagle, count = self.settings.get("eagle_config") or {}, 3
        if self.settings.get("norm_before_fc") or eagle.get("norm_before_fc"):
            aux = norm(aux, self.tensors["input_norm.weight"], self.eps)
        if self.settings.get("fc_norm") or self.settings.get("use_aux_norm"):
            names = ["fc_norm.0", "fc_norm.1", "fc_norm.2"]
            if self.settings.get("use_aux_norm"):
                names = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
            parts = zip(aux.chunk(count, -1), names, strict=True)
            aux = torch.cat([norm(part, self.tensors[f"{name}.weight"], self.eps) for part, name in parts], -1)
        return linear(aux, self.tensors["fc.weight"], self.tensors.get("fc.bias"))

    def row(self, token: int, hidden: Tensor, position: int, seen: list[list]) -> Tensor:
        """The raw output of one row; its keys and values join `seen`, by layer."""
        for index, layer in enumerate(self.layers):
            if index == 0:
                normed, residual = layer.normed(hidden, "hidden_norm"), hidden
                x = torch.cat([layer.normed(self.embedding[token], "input_layernorm"), normed], -1)
                residual = normed if self.settings.get("norm_before_residual") else residual
            else:
                x, residual = layer.normed(hidden, self.inner), hidden
            seen[index].append(layer.key_value(x, position))
            hidden = layer.mlp(residual + layer.attend(x, position, seen[index]))
        return hidden

    def loss(self, text: list[int], aux: Tensor, last: Tensor, head: Tensor, weights: Sequence[float]) -> Tensor:
        """Soft cross-entropy of every step from every row, with the text's own tokens fed back.

        `head` `[Vd, H]` and `last` `[T, H]` give the target's probabilities; tokens outside the vocabulary have none.
        """
        seen: list[list] = [[] for _ in self.layers]
        total = aux.new_zeros(())
        for row, feature in enumerate(aux):
            hidden = self.row(text[row + 1], self.fuse(feature), row, seen)
            own = [list(one) for one in seen]
            for step, weight in enumerate(weights):
                position = row + 1 + step
                if position + 1 >= len(aux):
                    break
                normed = norm(hidden, self.tensors["norm.weight"], self.eps)
                if text[position + 1] in self.ids.tolist():
                    p = (head @ last[position]).softmax(-1)
                    total = total - weight * (p * (self.head @ normed).log_softmax(-1)).sum()
                fed_back = normed if self.settings.get("norm_output") else hidden
                hidden = self.row(text[position + 1], fed_back, row + 1 + step, own)
        return total

    def propose(self, tokens: list[int], aux: Tensor, lookahead: int) -> list[int]:
        """After `tokens` `[T + 1]`, with features `[T, 3H]`."""
        seen: list[list] = [[] for _ in self.layers]
        hidden = aux.new_zeros(0)
        for position, feature in enumerate(aux):
            hidden = self.row(tokens[position + 1], self.fuse(feature), position, seen)
        found: list[int] = []
        while True:
            normed = norm(hidden, self.tensors["norm.weight"], self.eps)
            found.append(int(self.ids[(self.head @ normed).argmax()]))
            if len(found) == lookahead:
                return found
            fed_back = normed if self.settings.get("norm_output") else hidden
            hidden = self.row(found[-1], fed_back, len(aux) + len(found) - 1, seen)


class PlainDFlash:
    """Arguments as of `PlainEagle3`."""

    def __init__(self, settings: dict[str, Any], tensors: Tensors, embedding: Tensor, head: Tensor):
        self.layer = settings.get("transformer_layer_config", settings)
        own = settings | (settings.get("dflash_config") or {})
        self.mask, self.size, self.tensors = own["mask_token_id"], own["block_size"], tensors
        self.eps, self.embedding, self.ids = (
            self.layer.get("rms_norm_eps", 1e-6),
            embedding,
            target_ids(tensors, len(head)),
        )
        self.head = self.fixed = tensors.get("lm_head.weight", head[self.ids])
        kinds = enumerate(windows(self.layer))
        self.layers = [PlainLayer(tensors, f"layers.{index}.", self.layer, kind) for index, kind in kinds]
        for layer in self.layers:
            layer.ahead = settings.get("is_causal") is False or bool(settings.get("sliding_window_non_causal"))

    def loss(self, text: list[int], aux: Tensor, last: Tensor, head: Tensor, weights: Sequence[float]) -> Tensor:
        """Of every block whose first proposal can be compared; see `PlainEagle3.loss`."""
        total = aux.new_zeros(())
        for anchor in range(1, len(aux) - 1):
            logits = self.block(text[anchor], aux[:anchor]) @ self.head.T
            for place, weight in enumerate(weights):
                position = anchor + place
                if position + 1 < len(aux) and text[position + 1] in self.ids.tolist():
                    p = (head @ last[position]).softmax(-1)
                    total = total - weight * (p * logits[place].log_softmax(-1)).sum()
        return total

    def propose(self, tokens: list[int], aux: Tensor, lookahead: int) -> list[int]:
        """See `PlainEagle3.propose`."""
        return self.ids[(self.block(tokens[-1], aux) @ self.head.T).argmax(-1)][:lookahead].tolist()

    def block(self, token: int, aux: Tensor) -> Tensor:
        """Normed rows `[B - 1, H]` of a block after features `[a, 3H]`."""
        fused = norm(aux @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"], self.eps)
        anchor = len(aux)
        block = list(self.embedding[[token, *[self.mask] * (self.size - 1)]])
        for layer in self.layers:
            inputs = [layer.normed(row, "input_layernorm") for row in block]
            seen = [layer.key_value(x, position) for position, x in enumerate(fused)]
            seen += [layer.key_value(x, anchor + place) for place, x in enumerate(inputs)]
            places = list(enumerate(zip(block, inputs, strict=True)))
            block = [layer.mlp(row + layer.attend(x, anchor + place, seen)) for place, (row, x) in places]
        return norm(torch.stack(block[1:]), self.tensors["norm.weight"], self.eps)
