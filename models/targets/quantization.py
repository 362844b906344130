"""Quantized checkpoints: how a target is quantized, and matrices of it as floating-point numbers.

Layouts, by the tensors of a module (SGLang 0.5.23: layers/quantization/fp8.py, modelopt_quant.py, compressed_tensors/):

    fp8     weight e4m3 [N, K]        weight_scale_inv, or weight_scale: of the tensor, of rows [N, 1], or of blocks
    NVFP4   weight uint8 [N, K / 2]   weight_scale e4m3 [N, K / 16], weight_scale_2: a factor (ModelOpt)
            weight_packed             weight_scale e4m3 [N, K / 16], weight_global_scale: a divisor (llm-compressor)
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from infra.refusal import Refusal

BLOCK = 128
"""Rows and columns that share a scale where the checkpoint does not say (DeepSeek-V3)."""
NVFP4_GROUP = 16
ROWS = 4096
"""Rows that are dequantized at once."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0..7; bit 3 is the sign. The lower half of a byte is the even column."""
FLOATS = {"F64", "F32", "F16", "BF16"}
FP8 = {"F8_E4M3", "F8_E5M2"}
FP8_SCALES = ("weight_scale_inv", "weight_scale")
PACKED = ("weight_packed", "qweight")
"""Names of weights in formats that have no tensor `weight`."""
Layout = Literal["float", "fp8", "modelopt NVFP4", "llm-compressor NVFP4"]


def quantization_settings(folder: Path) -> dict[str, Any]:
    """The `quantization_config` of a Hugging Face folder, or ModelOpt's own file in its form; empty: not quantized."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or {}
    for tree in (config, text):
        # llm-compressor wrote `compression_config` before transformers could read it.
        if found := tree.get("quantization_config") or tree.get("compression_config"):
            return found
    file = folder / "hf_quant_config.json"
    if not file.is_file():
        return {}
    return json.loads(file.read_text()).get("quantization", {}) | {"quant_method": "modelopt"}


def read_quantization(folder: Path) -> str | None:
    """The method and format of a checkpoint, such as `fp8 128x128`, `modelopt NVFP4` or `gptq 4-bit`; None: floats."""
    settings = quantization_settings(folder)
    if not settings:
        return None
    method = str(settings.get("quant_method", "quantized"))
    if block := settings.get("weight_block_size"):
        return f"{method} {'x'.join(map(str, block))}"
    detail = settings.get("quant_algo") or settings.get("format")
    bits = settings.get("bits") or settings.get("w_bit")
    return " ".join(filter(None, (method, detail or (f"{bits}-bit" if bits else ""))))


@dataclass(frozen=True)
class StoredMatrix:
    """The weight of a module, as its checkpoint stores it."""

    folder: Path
    module: str
    files: Mapping[str, str]
    """File of each of the module's tensors, by the last part of its name."""
    layout: Layout
    block: tuple[int, int] = (BLOCK, BLOCK)

    @classmethod
    def find(cls, folder: Path, files: Mapping[str, str], module: str) -> "StoredMatrix":
        """Look at the tensors' data types; no weights are read. Raises Refusal for a packed format."""
        return cls.find_all(folder, files, [module])[module]

    @classmethod
    def find_all(cls, folder: Path, files: Mapping[str, str], modules: Iterable[str]) -> dict[str, "StoredMatrix"]:
        """The same for several modules, by module; the header of each file is read once."""
        own: dict[str, dict[str, str]] = {module: {} for module in modules}
        by_file: dict[str, list[tuple[str, str]]] = {}
        for name, file in files.items():
            module, _, last = name.rpartition(".")
            if module in own:
                own[module][last] = file
                by_file.setdefault(file, []).append((module, last))
        dtypes: dict[str, dict[str, str]] = {module: {} for module in own}
        for file, tensors in by_file.items():
            with safe_open(folder / file, framework="pt") as opened:
                for module, last in tensors:
                    dtypes[module][last] = opened.get_slice(f"{module}.{last}").get_dtype()
        block = _block(quantization_settings(folder))
        return {
            module: cls(folder, module, tensors, _layout_of(folder, module, dtypes[module]), block)
            for module, tensors in own.items()
        }

    def read(self, dtype: torch.dtype) -> Tensor:
        """`[N, K]`, dequantized in float32 and then rounded to `dtype`."""
        tensors = {name: self._tensor(name) for name in self.files if name.startswith(("weight", *PACKED))}
        if self.layout == "float":
            return tensors["weight"].to(dtype)
        codes = tensors["weight_packed" if "weight_packed" in tensors else "weight"]
        scales = self._fp8_scales(tensors, codes) if self.layout == "fp8" else _nvfp4_scales(tensors)
        packed = 1 if self.layout == "fp8" else 2
        matrix = torch.empty(len(codes), codes.shape[1] * packed, dtype=dtype)
        # In parts, because all of it in float32 is several times the size of the file.
        for first in range(0, len(codes), ROWS):
            rows = slice(first, first + ROWS)
            values = codes[rows].float() if packed == 1 else _e2m1(codes[rows])
            scale = scales[rows] if len(scales) > 1 else scales
            if self.layout == "fp8" and scale.shape[1] > 1:
                scale = scale.repeat_interleave(self.block[1], 1)[:, : values.shape[1]]
            elif packed == 2:
                scale = scale.repeat_interleave(NVFP4_GROUP, 1)
            matrix[rows] = (values * scale).to(dtype)
        return matrix

    def _fp8_scales(self, tensors: Mapping[str, Tensor], codes: Tensor) -> Tensor:
        """`[N or 1, 1 or blocks]` float32 factors of rows. Raises Refusal for a scale of another shape."""
        scale = next((tensors[name] for name in FP8_SCALES if name in tensors), torch.ones(1)).float()
        rows, columns = codes.shape
        if scale.numel() == 1:
            return scale.view(1, 1)
        if scale.numel() == rows and scale.shape[0] == rows:
            return scale.view(rows, 1)
        height, width = self.block
        if tuple(scale.shape) != (-(-rows // height), -(-columns // width)):
            raise Refusal(
                f"{self.folder}: the scale of {self.module} is {list(scale.shape)}, which are not blocks of {height} x "
                f"{width} of {rows} x {columns}: give weight_block_size in the target's quantization_config"
            )
        return scale.repeat_interleave(height, 0)[:rows]

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return file.get_tensor(f"{self.module}.{name}")


def _nvfp4_scales(tensors: Mapping[str, Tensor]) -> Tensor:
    """`[N, K / 16]` float32 factors."""
    scale = tensors["weight_scale"].float()
    # ModelOpt stores the global scale of the values, llm-compressor that of the quantization: its inverse.
    if "weight_scale_2" in tensors:
        return scale * tensors["weight_scale_2"].float()
    return scale / tensors["weight_global_scale"].float()


def _e2m1(codes: Tensor) -> Tensor:
    """`[n, K]` float32 values of `[n, K / 2]` bytes."""
    values = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    return values[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).int()]


def _layout_of(folder: Path, module: str, dtypes: Mapping[str, str]) -> Layout:
    layout = _layout(dtypes)
    if layout is None:
        stored = ", ".join(f"{name} {dtype}" for name, dtype in sorted(dtypes.items()))
        raise Refusal(
            f"{folder}: {module} is stored as {stored} ({read_quantization(folder) or 'no quantization_config'}), and "
            "the draft's training reads float, fp8 and NVFP4 only: quantize the target with this module left out "
            "(ignore, modules_to_not_convert or exclude_modules; for GPTQ lm_head: false)"
        )
    return layout


def _layout(dtypes: Mapping[str, str]) -> Layout | None:
    """By safetensors' names of the data types of a module's tensors; None for a format that cannot be read."""
    weight = dtypes.get("weight")
    if weight in FLOATS:
        return "float"
    if weight in FP8:
        return "fp8"
    nvfp4 = dtypes.get("weight_scale") == "F8_E4M3"
    if nvfp4 and weight == "U8" and "weight_scale_2" in dtypes:
        return "modelopt NVFP4"
    if nvfp4 and dtypes.get("weight_packed") == "U8" and "weight_global_scale" in dtypes:
        return "llm-compressor NVFP4"
    return None


def _block(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block with one scale."""
    groups: Iterable[Any] = (settings.get("config_groups") or {}).values()
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups if isinstance(group, dict)]
    height, width = next((size for size in (settings.get("weight_block_size"), *structures) if size), (BLOCK, BLOCK))
    return int(height), int(width)
