"""Tiny targets of `target_families` with an MTP layer of random weights, stored as in published checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from target_families import FAMILIES, LAYERS, write
from torch import Tensor, nn

WEIGHTS = "model.safetensors"
DEEPSEEK = (f"model.layers.{LAYERS}.", "", ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
QWEN = ("mtp.", "layers.0.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))


@dataclass(frozen=True)
class Layout:
    """How a family computes and stores its MTP layer."""

    module: str
    """Of transformers, and the beginning of its classes' names."""
    start: str
    prefix: str
    inside: str
    others: tuple[str, str, str, str]
    """What projects both inputs, the norms of embedding and hidden state, the last norm."""
    stacked: bool = False
    """Whether all experts' weights are one tensor, as in Qwen3.6."""

    def text(self, folder: Path) -> Any:
        """The family's text configuration, of one full-attention layer with experts where it has some."""
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config) | {"num_hidden_layers": 1, "attn_implementation": "eager"}
        config |= {"layer_types": ["full_attention"]} if "layer_types" in config else {}
        config |= {"mlp_layer_types": ["sparse"]} if "mlp_layer_types" in config else {}
        config |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in config else {}
        text = "Text" if self.start.startswith("Qwen3_5") else ""
        return self.kind(f"{text}Config").from_dict(config)

    def kind(self, name: str) -> Any:
        """A class of the family: `DecoderLayer`, `RMSNorm` and so on."""
        part = "configuration" if name.endswith("Config") else "modeling"
        module = import_module(f"transformers.models.{self.module}.{part}_{self.module}")
        return getattr(module, f"{self.start}{name}")

    def stored(self, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The decoder layer's tensors by the checkpoint's names."""
        for name, tensor in layer.state_dict().items():
            before, _, kind = name.rpartition(".")
            if not before.endswith("mlp.experts") or self.stacked:
                yield self.prefix + self.inside + name, tensor
                continue
            for number, matrix in enumerate(tensor):
                parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
                for projection, part in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                    yield f"{self.prefix}{self.inside}{before}.{number}.{projection}_proj.weight", part


LAYOUTS: dict[str, Layout] = {
    "qwen3_5": Layout("qwen3_5", "Qwen3_5", *QWEN),
    "qwen3_5_moe": Layout("qwen3_5_moe", "Qwen3_5Moe", *QWEN, stacked=True),
    "qwen3_next": Layout("qwen3_next", "Qwen3Next", *QWEN),
    "glm4_moe": Layout("glm4_moe", "Glm4Moe", *DEEPSEEK),
    "glm4_moe_lite": Layout("glm4_moe_lite", "Glm4MoeLite", *DEEPSEEK),
    "deepseek_v3": Layout("deepseek_v3", "DeepseekV3", *DEEPSEEK),
}


def random_layer(layout: Layout, folder: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """transformers' decoder layer with random weights, and all tensors of the MTP layer by the checkpoint's names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = layout.text(folder)
        layer, size = layout.kind("DecoderLayer")(config, 0).eval(), config.hidden_size
        for name, tensor in layer.state_dict().items():
            own = 0.0 if "norm" not in name or layout.prefix == "mtp." else 1.0
            # In bfloat16 as published, but for a router's bias.
            drawn = own + torch.randn(tensor.shape) * 0.2
            tensor.copy_(drawn if name.endswith("bias") else drawn.bfloat16())
        tensors = dict(layout.stored(layer))
        for number, name in enumerate(layout.others):
            shape = (size, 2 * size) if number == 0 else (size,)
            tensors[f"{layout.prefix}{name}.weight"] = (torch.randn(shape) * 0.2).bfloat16().float()
    return layer, tensors


def write_with_layer(family: str, folder: Path, tokenizer: Path) -> Path:
    """Write the family's target with its MTP layer to `folder`."""
    write(FAMILIES[family], folder, tokenizer)
    add_layer(family, folder)
    return folder


def add_layer(family: str, folder: Path) -> None:
    """Write an MTP layer beside the target in `folder`."""
    _, own = random_layer(LAYOUTS[family], folder)
    if own_layers := [name for name in own if name.startswith("model.layers.")]:
        assert not own_layers[0].startswith(f"model.layers.{LAYERS - 1}.")
        settings = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(settings))
    kept = {name: tensor if name.endswith("bias") else tensor.bfloat16() for name, tensor in own.items()}
    kept = {name: tensor.contiguous() for name, tensor in kept.items()}
    save_file(load_file(folder / WEIGHTS) | kept, folder / WEIGHTS, {"format": "pt"})
