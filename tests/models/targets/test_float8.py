"""Hidden states in float8: half the bytes, each layer of a row with its own scale, and what is read back."""

import pytest
import torch

from infra.planner.traffic import stored_bytes_per_token
from models.targets.float8 import FLOAT8, decode, encode
from models.targets.layout import HiddenStateLayout, SampleError, as_bytes
from models.targets.model import HiddenStates

TOKENS, LAYERS, HIDDEN = 24, 3, 192
LAYOUT = HiddenStateLayout(LAYERS, HIDDEN, FLOAT8, top_token=True)


def sample(dtype: torch.dtype = torch.bfloat16) -> HiddenStates:
    """Layers a thousand times larger than others, as in Gemma, and a row that is a hundred times larger."""
    torch.manual_seed(0)
    aux = torch.randn(TOKENS, LAYERS, HIDDEN) * torch.tensor([1.0, 40.0, 1000.0])[:, None]
    aux[0] *= 100
    last = torch.randn(TOKENS, HIDDEN)
    return HiddenStates(aux.flatten(1).to(dtype), last.to(dtype), torch.arange(TOKENS, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_read_back_differs_by_rounding(dtype: torch.dtype) -> None:
    hidden = sample(dtype)
    buffers = LAYOUT.pack(hidden)
    assert sum(buffer.nbytes for buffer in buffers.values()) == TOKENS * LAYOUT.bytes_per_token
    read = LAYOUT.empty(TOKENS)
    for name, buffer in buffers.items():
        as_bytes(getattr(read, name))[:] = buffer
    back = LAYOUT.restored(read)
    LAYOUT.check(back, TOKENS)
    assert back.aux.dtype == back.last.dtype == LAYOUT.restored_dtype == torch.bfloat16
    assert back.top is not None
    assert back.top.tolist() == list(range(TOKENS))
    before = [*hidden.aux.chunk(LAYERS, -1), hidden.last]
    for own, seen in zip(before, [*back.aux.chunk(LAYERS, -1), back.last], strict=True):
        errors = (seen.float() - own.float()).norm(dim=-1) / own.float().norm(dim=-1)
        assert 0.01 < errors.max() < 0.035


def test_zeros_and_the_greatest_numbers_are_exact() -> None:
    rows = torch.zeros(2, 8)
    rows[1] = torch.tensor([1e30, -1e30, 0, 0, 1e30, 0, 0, 0])
    assert torch.equal(decode(encode(rows, 2), 2, torch.float32), rows)


def test_a_value_that_is_not_finite_is_not_hidden_by_its_scale() -> None:
    hidden = sample()
    hidden.aux[5, 7] = torch.nan
    with pytest.raises(SampleError, match="not finite"):
        LAYOUT.check(LAYOUT.restored(LAYOUT.stored(hidden)), TOKENS)


def test_what_is_stored_is_stored_once() -> None:
    """The SGLang plugin encodes on the GPU, joins chunks on the host and packs them there."""
    hidden = sample()
    chunks = [LAYOUT.stored(hidden.rows(rows)).named() for rows in (slice(0, 10), slice(10, TOKENS))]
    joined = HiddenStates(**{name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]})
    LAYOUT.check_shapes(joined, TOKENS)
    for name, buffer in LAYOUT.pack(joined).items():
        assert buffer == LAYOUT.pack(hidden)[name]
    with pytest.raises(SampleError, match="aux has shape"):
        LAYOUT.check_shapes(joined, TOKENS + 1)


def test_the_planner_counts_half_the_bytes_and_the_scales() -> None:
    planned = stored_bytes_per_token(LAYERS, HIDDEN, "float8", top_token=True)
    assert planned == LAYOUT.bytes_per_token == (LAYERS + 1) * (HIDDEN + 4) + 4
    assert planned < 0.53 * stored_bytes_per_token(LAYERS, HIDDEN, "bfloat16", top_token=True)
