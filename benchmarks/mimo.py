"""A tiny target in the layout of MiMo-7B: the body of the tiny Llama, and an MTP layer with random weights.

A Llama is a Qwen2 whose biases are 0, and MiMo's body is a Qwen2. The weights are in two files, one of which holds the
MTP layer and a part of the body.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
REMOTE_CODE = '''"""As published with MiMo-7B."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
'''
PREFIX = "model.mtp_layers.0."


def write_mimo(llama: Path, folder: Path, seed: int = 0) -> Path:
    """Write the target to `folder` from the tiny Llama's; deterministic for a seed."""
    folder.mkdir(parents=True)
    for file in llama.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    settings = json.loads((llama / "config.json").read_text())
    hidden, heads, kv_heads = (settings[f"num_{n}"] if n != "hidden" else settings["hidden_size"] for n in
                               ("hidden", "attention_heads", "key_value_heads"))  # fmt: skip
    size, inner = hidden // heads, settings["intermediate_size"]
    settings |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    settings |= {"num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": None}
    settings["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    (folder / "configuration_mimo.py").write_text(REMOTE_CODE)
    body = load_file(llama / "model.safetensors")
    for layer in range(settings["num_hidden_layers"]):
        for name, width in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            body[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(width * size)
    own = _random_layer(hidden, (heads * size, kv_heads * size), inner, seed)
    second = {name: tensor for name, tensor in body.items() if name.startswith("model.norm") or "layers.0." in name}
    first = {name: tensor for name, tensor in body.items() if name not in second}
    parts = dict(zip(SHARDS, (first, second | own), strict=True))
    for name, tensors in parts.items():
        save_file(tensors, folder / name, {"format": "pt"})
    places = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _random_layer(hidden: int, widths: tuple[int, int], inner: int, seed: int) -> dict[str, Tensor]:
    """Norms of 1, matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = widths
    shapes = {"input_proj": (hidden, 2 * hidden), "self_attn.o_proj": (hidden, queries)}
    shapes |= {
        f"self_attn.{name}_proj": (width, hidden) for name, width in zip("qkv", (queries, keys, keys), strict=True)
    }
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layer = {
        f"{PREFIX}{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    for name in (
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        "input_layernorm",
        "post_attention_layernorm",
    ):
        layer[f"{PREFIX}{name}.weight"] = torch.ones(hidden)
    for name, width in zip("qkv", (queries, keys, keys), strict=True):
        layer[f"{PREFIX}self_attn.{name}_proj.bias"] = torch.zeros(width)
    return layer
