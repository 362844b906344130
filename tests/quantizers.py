"""Quantizers of tests: a checkpoint's weights in the layouts of published repositories.

The tensors' names and data types are those of deepseek-ai/DeepSeek-V3 and Qwen3-*-FP8 (fp8 blocks), nvidia/*-FP8 and
*-NVFP4 (ModelOpt), RedHatAI/*-FP8-dynamic and *-NVFP4 (llm-compressor), and of AWQ's and GPTQ's packers.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.targets.quantization import E2M1

FP8 = torch.float8_e4m3fn
GREATEST = 448.0
Tensors = dict[str, Tensor]


def blocks(weight: Tensor, size: int = 128) -> Tensor:
    """The greatest magnitude of each block."""
    rows, columns = (-(-length // size) for length in weight.shape)
    padded = torch.zeros(rows * size, columns * size)
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return padded.view(rows, size, columns, size).amax((1, 3))


def spread(scale: Tensor, weight: Tensor, size: int = 128) -> Tensor:
    return scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]


def fp8_blocks(weight: Tensor, size: int = 128) -> Tensors:
    scale = blocks(weight, size) / GREATEST
    return {"weight": (weight / spread(scale, weight, size)).to(FP8), "weight_scale_inv": scale}


def fp8_rows(weight: Tensor) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / GREATEST).bfloat16()
    return {"weight": (weight / scale.float()).to(FP8), "weight_scale": scale}


def fp8_tensor(weight: Tensor) -> Tensors:
    scale = weight.abs().max() / GREATEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale, "input_scale": torch.tensor(0.1)}


def nvfp4(weight: Tensor, llm_compressor: bool) -> Tensors:
    whole = weight.abs().max() / (GREATEST * 6)
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / whole).to(FP8)
    values = groups / (scale.float() * whole)[..., None]
    levels = torch.tensor(E2M1)
    codes = (values.abs()[..., None] - levels).abs().argmin(-1) + 8 * (values < 0)
    codes = codes.flatten(1).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    if llm_compressor:
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": (1 / whole)[None]}
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.1)}


def awq(weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    packed, groups = torch.zeros(columns, rows // 8, dtype=torch.int32), -(-columns // 128)
    zeros = torch.zeros(groups, rows // 8, dtype=torch.int32)
    return {"qweight": packed, "qzeros": zeros, "scales": torch.ones(groups, rows, dtype=torch.float16)}


def gptq(weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    packed, indices = torch.zeros(columns // 8, rows, dtype=torch.int32), torch.zeros(columns, dtype=torch.int32)
    return awq(weight) | {"qweight": packed, "g_idx": indices}


def pack_quantized(weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    scale = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
    packed = torch.zeros(rows, columns // 8, dtype=torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}


def quantize(folder: Path, modules: Iterable[str], quantizer: Callable[[Tensor], Tensors], settings: Any) -> Tensors:
    """Replace the modules' weights, and return what they were."""
    tensors = load_file(folder / "model.safetensors")
    before = {module: tensors.pop(f"{module}.weight").float() for module in modules}
    for module, weight in before.items():
        tensors |= {f"{module}.{name}": tensor.contiguous() for name, tensor in quantizer(weight).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return before


def linear_modules(folder: Path) -> list[str]:
    """All linear layers of a decoder but its head."""
    names = load_file(folder / "model.safetensors")
    return [name.removesuffix(".weight") for name in names if name.endswith("_proj.weight")]
