"""The draft step's budgets on a GPU, by a trace of its operations."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("roofline")


def small(roofline: Any) -> Any:
    return roofline.Step(
        hidden=256, vocabulary=4096, draft_vocabulary=1024, intermediate=768, heads=4, kv_heads=2, head_dim=64,
        ttt_steps=3, lengths=(300, 80), chunk_tokens=128,
    )  # fmt: skip


def test_a_step_keeps_its_budgets(roofline) -> None:
    trace = roofline.trace_step(small(roofline))
    found = roofline.report(small(roofline), trace)
    assert found["kernels"] <= 1400
    assert not found["host_waits"]
    assert found["planned_of_traced"] == pytest.approx(1, abs=0.1)


def test_the_trace_counts_the_arithmetic_of_the_step(roofline) -> None:
    """Matrix products of forward and backward, by hand."""
    step = small(roofline)
    products = roofline.trace_step(step).by_kind["products"].flops
    rows, hidden, queries, keys = step.tokens, step.hidden, 4 * 64, 2 * 64
    layer = 2 * hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * step.intermediate
    body = 6 * rows * (step.ttt_steps * layer) + 4 * rows * 3 * hidden * hidden
    head = 6 * rows * step.ttt_steps * hidden * step.draft_vocabulary
    assert products == pytest.approx(body + head + 2 * rows * hidden * step.draft_vocabulary, rel=0.01)
