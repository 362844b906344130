"""The canary of quantized targets accepts the rounding of quantized kernels, and nothing that is another layer's."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizers import fp8_blocks, linear_modules, nvfp4, quantize
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.capture.ranking import check_ranking
from models.targets.dequantized import load_dequantized, stream_dequantized
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout
from models.targets.model import TargetModel
from models.targets.weights import read_target_head

IDS = (0, 1, 3)
TOKENS = torch.randint(4, 1000, (32,), generator=torch.Generator().manual_seed(0))
LAYOUT = HiddenStateLayout(3, 192, torch.bfloat16)
FORMATS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4": (lambda weight: nvfp4(weight, False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tiny_target: TargetRecord, tmp_path: Path) -> Path:
    """The tiny target, its linear layers quantized."""
    folder = Path(shutil.copytree(tiny_target.path, tmp_path / "quantized"))
    quantize(folder, linear_modules(folder), *FORMATS[request.param])
    return folder


@pytest.fixture(params=["in memory", "weight by weight"])
def quantized(request: pytest.FixtureRequest, folder: Path) -> TargetModel:
    """The target, dequantized again."""
    if request.param == "in memory":
        return TargetModel(load_dequantized(folder, torch.float32), IDS)
    model, head = stream_dequantized(folder, torch.float32), read_target_head(folder, torch.float32)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}, "nothing is in memory"
    return TargetModel(model, IDS, head=head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_weights_that_are_read_one_by_one_compute_the_same(folder: Path, dtype: torch.dtype) -> None:
    ours, theirs = (load(folder, dtype).eval()(TOKENS[None]).logits for load in (stream_dequantized, load_dequantized))
    assert torch.equal(ours, theirs)


def test_weights_that_cannot_be_read_one_by_one_are_named(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 24}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=r"no model\.layers\.0\.mlp\.experts\.gate_up_proj, as transformers calls it"):
        stream_dequantized(tmp_path, torch.float32)


@pytest.fixture(scope="module")
def served(tiny_target: TargetRecord) -> HiddenStates:
    """States of the float target: those of the quantized one, but for the rounding of its kernels."""
    target = TargetModel.load(Path(tiny_target.path), IDS, torch.float32)
    hidden = target.forward(TOKENS[None])
    return HiddenStates(hidden.aux[0].bfloat16(), hidden.last[0].bfloat16())


def test_rounding_of_quantized_kernels_is_accepted(quantized: TargetModel, served: HiddenStates) -> None:
    check_ranking(quantized, served, TOKENS, LAYOUT)


def swapped(hidden: HiddenStates) -> HiddenStates:
    first, second, third = hidden.aux.chunk(3, dim=-1)
    return replace(hidden, aux=torch.cat([second, first, third], dim=-1))


def shifted(hidden: HiddenStates) -> HiddenStates:
    return replace(hidden, aux=hidden.aux.roll(1, 0))


def other_states(hidden: HiddenStates) -> HiddenStates:
    return replace(hidden, last=hidden.last.roll(1, 0))


def not_finite(hidden: HiddenStates) -> HiddenStates:
    last = hidden.last.clone()
    last[2, 3] = torch.nan
    return replace(hidden, last=last)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (swapped, r"captured as layer 0 .* nearest to layer 1, \+0 positions"),
        (shifted, r"layer 0 .* nearest to layer 0, -1 positions"),
        (other_states, r"plain forward at only \d+% of positions"),
        (not_finite, "last has values that are not finite"),
    ],
)
def test_what_is_wrong_is_named(
    quantized: TargetModel, served: HiddenStates, wrong: Callable[[HiddenStates], HiddenStates], told: str
) -> None:
    with pytest.raises(Refusal, match=told):
        check_ranking(quantized, wrong(served), TOKENS, LAYOUT)
