"""Capture through the canary's eyes: it accepts the right hidden states and names each way to get them wrong."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.capture.engine import check_capture
from models.capture.plain_engine import PlainEngine
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout, as_bytes
from models.targets.model import TargetModel

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


def test_the_canary_names_a_wrong_top_token(target, captured):
    tokens, hidden = captured
    shape = replace(layout(target), top_token=True)
    right = replace(hidden, top=target.top_tokens(hidden.last))
    check_capture(target, right, tokens, shape)
    wrong = right.top.clone()
    wrong[5] = (wrong[5] + 1) % 1000
    with pytest.raises(ValueError, match=f"next token is {int(wrong[5])}, head"):
        check_capture(target, replace(right, top=wrong), tokens, shape)
    wrong[5] = 10**6
    with pytest.raises(ValueError, match="next token is 1000000, head"):
        check_capture(target, replace(right, top=wrong), tokens, shape)
    with pytest.raises(ValueError, match=r"top has shape \[23\], the run needs \[24\]"):
        check_capture(target, replace(right, top=wrong[1:]), tokens, shape)


def test_top_tokens_are_the_greatest_logits_in_pieces_too(target, captured, monkeypatch):
    _, hidden = captured
    expected = target.logits(hidden.last).argmax(-1)
    assert torch.equal(target.top_tokens(hidden.last), expected.int())
    monkeypatch.setattr("models.targets.weights.TOP_BYTES", 5 * 1024 * 4)
    assert torch.equal(target.top_tokens(hidden.last), expected.int())


def test_the_plain_engine_sends_top_tokens_where_the_draft_needs_them(make_run, target):
    """Not with the whole vocabulary, and not where the text's token decides."""
    asked = {"draft.vocab_size=700": True, "training.out_of_vocabulary=text": False}
    for override, needed in asked.items():
        run = PreparedRun.open(make_run(override.partition("=")[2], "draft.vocab_size=700", override).path)
        assert run.layout.top_token is needed
        engine, tokens = PlainEngine(run), run.open_samples()[0].tokens
        engine.check_canary(tokens)
        record = engine.capture("run/0/0/1", tokens).record
        assert record.nbytes == len(tokens) * run.layout.bytes_per_token
        back = run.layout.empty(len(tokens))
        engine.transport.get(record, run.layout.views(back))
        if needed:
            assert torch.equal(back.top, target.logits(back.last).argmax(-1).int())
        else:
            assert back.top is None
    assert not PreparedRun.open(make_run("whole").path).layout.top_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_round_trip(target, captured, dtype):
    _, hidden = captured
    shape, hidden = HiddenStateLayout(3, 192, dtype, top_token=True), replace(hidden, top=torch.arange(24))
    buffers = shape.pack(hidden)
    assert sum(buffer.nbytes for buffer in buffers.values()) == 24 * shape.bytes_per_token
    back = shape.empty(24)
    for name, buffer in buffers.items():
        as_bytes(getattr(back, name))[:] = buffer
    assert torch.equal(back.aux, hidden.aux.to(dtype))
    assert torch.equal(back.last, hidden.last.to(dtype))
    assert back.top.tolist() == list(range(24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_without_layers_the_last_states_alone_are_stored(target, captured, dtype):
    _, hidden = captured
    hidden, shape = HiddenStates(hidden.aux[:, :0], hidden.last), HiddenStateLayout(0, 192, dtype)
    shape.check(hidden, 24)
    buffers = shape.pack(hidden)
    assert list(buffers) == ["last"]
    assert buffers["last"].nbytes == 24 * shape.bytes_per_token
    back = shape.empty(24)
    as_bytes(back.last)[:] = buffers["last"]
    back = shape.restored(back)
    assert back.features is back.last
    assert torch.equal(back.last, shape.restored(shape.stored(hidden)).last)
    assert (back.last - hidden.last).norm() < 0.05 * hidden.last.norm()
