"""Capture through the canary's eyes: it accepts the right hidden states and names each way to get them wrong."""

from pathlib import Path

import pytest
import torch

from models.capture.engine import check_capture
from models.targets.layout import HiddenStateLayout, as_bytes
from models.targets.model import HiddenStates, TargetModel

IDS = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tiny_target):
    return TargetModel.load(Path(tiny_target.path), IDS, torch.float32)


@pytest.fixture(scope="module")
def captured(target):
    tokens = torch.randint(4, 1000, (24,), generator=torch.Generator().manual_seed(0))
    hidden = target.forward(tokens[None])
    return tokens, HiddenStates(hidden.aux[0], hidden.last[0])


def layout(target, count: int = 3) -> HiddenStateLayout:
    return HiddenStateLayout(count, target.model.config.hidden_size, torch.float32)


def test_the_canary_accepts_a_right_capture(target, captured):
    tokens, hidden = captured
    check_capture(target, hidden, tokens, layout(target))


def test_the_canary_accepts_the_last_layer(target, captured):
    """Transformers records it after the final norm; captured is what the layer gave, and nothing else passes."""
    tokens, _ = captured
    high = TargetModel(target.model, (2, 3))
    hidden = high.forward(tokens[None])
    states = HiddenStates(hidden.aux[0], hidden.last[0])
    check_capture(high, states, tokens, HiddenStateLayout(2, 192, torch.float32))
    lower, _ = states.aux.chunk(2, dim=-1)
    with pytest.raises(ValueError, match="layer 3"):
        check_capture(
            high,
            HiddenStates(torch.cat([lower, lower], dim=-1), states.last),
            tokens,
            HiddenStateLayout(2, 192, torch.float32),
        )


def wrong_layer(target, hidden, tokens):
    other = TargetModel(target.model, (0, 1, 3)).forward(tokens[None])
    return HiddenStates(other.aux[0], hidden.last)


def missing_norm(target, hidden, tokens):
    raw = TargetModel(target.model, (3,)).forward(tokens[None]).aux[0]
    return HiddenStates(hidden.aux, raw)


def swapped(target, hidden, tokens):
    return HiddenStates(torch.cat(hidden.aux.chunk(3, dim=-1)[::-1], dim=-1), hidden.last)


def shifted(target, hidden, tokens):
    return HiddenStates(hidden.aux.roll(1, 0), hidden.last)


def not_finite(target, hidden, tokens):
    last = hidden.last.clone()
    last[3, 5] = float("nan")
    return HiddenStates(hidden.aux, last)


def short(target, hidden, tokens):
    return HiddenStates(hidden.aux[1:], hidden.last)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_layer, "layer 2 differs"),
        (missing_norm, "after the final norm differs"),
        (swapped, "layer 0 differs"),
        (shifted, "layer 0 differs"),
        (not_finite, "last has values that are not finite"),
        (short, r"aux has shape \[23, 576\], the run needs \[24, 576\]"),
    ],
)
def test_the_canary_names_what_is_wrong(target, captured, damage, message):
    tokens, hidden = captured
    with pytest.raises(ValueError, match=message):
        check_capture(target, damage(target, hidden, tokens), tokens, layout(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_round_trip(target, captured, dtype):
    _, hidden = captured
    shape = HiddenStateLayout(3, 192, dtype)
    buffers = shape.pack(hidden)
    assert sum(buffer.nbytes for buffer in buffers.values()) == 24 * shape.bytes_per_token
    back = shape.empty(24)
    for name, buffer in buffers.items():
        as_bytes(getattr(back, name))[:] = buffer
    assert torch.equal(back.aux, hidden.aux.to(dtype))
    assert torch.equal(back.last, hidden.last.to(dtype))
