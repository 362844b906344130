"""Benchmarks of the draft step, tiny and on a CPU: that they say what they claim to say."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from speculators.models.dflash import core

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def by_name(name: str) -> ModuleType:
        return importlib.import_module(name)

    return by_name


@pytest.mark.parametrize("argmax", [False, True])
def test_the_plain_step_does_the_same_work(load, argmax):
    """All positions supervised by either rule; gradients of float32."""
    contestants = load("draft_contestants")
    work = contestants.make_work(contestants.SHAPES["tiny"], torch.float32, argmax=argmax)
    losses, gradients = [], []
    for step in (contestants.our_step, contestants.plain_step):
        losses.append(step(work, torch.float32).item())
        gradients.append([p.grad for p in work.draft.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for ours, plain in zip(*gradients, strict=True):
        assert (ours - plain).norm() < 1e-4 * plain.norm()


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_steps_do_the_same_work_as_speculators(load, method, monkeypatch):
    """Its own class has the same gradients, but for the factor by which the sums are divided."""
    contestants = load("block_contestants")
    # The step replaces it, for the rest of the process.
    monkeypatch.setattr(core, "select_anchors", core.select_anchors)
    gradients = []
    for make_step in (contestants.our_step, contestants.speculators_step):
        model, step = make_step(contestants.make_work(method, contestants.SHAPES["tiny"], torch.float32), torch.float32)
        assert torch.isfinite(step())
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.requires_grad})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    factor = ours["fc.weight"].norm() / theirs["fc.weight"].norm()
    for name, gradient in ours.items():
        assert gradient.norm() > 0, name
        assert (gradient - factor * theirs[name]).norm() < 1e-4 * gradient.norm(), name


def test_the_longest_sample_on_a_cpu(load, tmp_path):
    path, max_length = tmp_path / "found.json", load("max_length")
    given = ["--shapes", "tiny", "--device", "cpu", "--lengths", "32", "64", "--mfu-length", "32", "--repeats", "1"]
    max_length.main([*given, "--json", str(path)])
    found = json.loads(path.read_text())["shapes"]["tiny"]
    assert [(one["tokens"], one["fits"]) for one in found["curve"]] == [(32, True), (64, True)]
    assert found["longest"] == 64
    kept, again = found["timed"]
    assert (kept["recompute"], again["recompute"]) == (False, True)
    assert kept["loss"] == pytest.approx(again["loss"], rel=1e-4)


@pytest.mark.parametrize("limit", [3000, 9000, 70_000])
def test_the_search_ends_next_to_what_does_not_fit(load, monkeypatch, limit):
    max_length = load("max_length")

    def measure(shape, *_rest):
        return {"tokens": shape.tokens} if shape.tokens <= limit else None

    monkeypatch.setattr(max_length, "measure", measure)
    tried = list(max_length.search(load("draft_contestants").SHAPES["tiny"], "cpu", 512))
    longest = max((one["tokens"] for one in tried if one["fits"]), default=0)
    assert limit - 512 <= longest <= limit


def test_a_line_through_memory(load):
    slope, intercept, worst = load("draft_step").straight_line([1, 2, 3, 4], [12.0, 14.0, 16.0, 18.0])
    assert (slope, intercept) == pytest.approx((2, 10))
    assert worst < 1e-9
