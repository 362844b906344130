"""Products on weights in oneDNN's order."""

from pathlib import Path

import pytest
import torch
from torch import nn

from infra.records.data_path import TargetRecord
from models.decoding.continuations import continue_batch
from models.targets.model import TargetModel
from models.targets.packed import PackedLinear, pack_products


@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 5), (300,)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_plain_layer(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(96, 160, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(*rows, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = layer.double()(x.double())
        packed = PackedLinear(layer.bfloat16())
        found = packed(x)
        plain = layer.bfloat16()(x)
    assert found.shape == plain.shape
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()
    assert not list(packed.parameters()) or bias, "the plain weight would take its memory again"


def test_a_target_decodes_with_them(tiny_target: TargetRecord) -> None:
    plain, packed = (TargetModel.load(Path(tiny_target.path), [0], torch.bfloat16) for _ in range(2))
    pack_products(packed)
    assert any(type(module) is PackedLinear for module in packed.body.modules())
    assert not any(type(module) is nn.Linear for module in packed.body.modules())
    last = torch.randn(4, plain.head_weight.shape[1], dtype=torch.bfloat16)
    found = packed.logits(last)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found, plain.logits(last), rtol=2e-2, atol=2e-2)
    prompts = [[5, 6, 7], [8, 9]]
    texts = continue_batch(packed, prompts, 8, frozenset())
    assert [len(text) for text in texts] == [8, 8]


def test_float32_is_left_alone(tiny_target: TargetRecord) -> None:
    """Its figures are compared to the last bit."""
    target = TargetModel.load(Path(tiny_target.path), [0], torch.float32)
    pack_products(target)
    assert target.head.packed is None
    assert not any(type(module) is PackedLinear for module in target.body.modules())
