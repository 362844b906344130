"""The draft step's budgets on a GPU, by a trace of its operations."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_device  # noqa: F401  before any backward pass of the process
import pytest
import torch

from infra.planner.memory import usable

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
    assert found["kernels"] <= 800
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


def test_the_recipes_step_reaches_half_of_the_peak(roofline) -> None:
    """Qwen3-8B's draft, vocabulary 32K, TTT 7, 4 x 1,500 tokens, predicted for one H100."""
    step = roofline.SHAPES["four"]
    found = roofline.report(step, roofline.trace_step(step))
    assert found["predicted_mfu"] >= 0.5
    assert found["predicted_ms_by_kind"]["element-wise"] <= 70
    assert found["kernels"] <= 2500
    assert found["planned_of_traced"] == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_128k_tokens_fit_80_gb(roofline) -> None:
    step = roofline.SHAPES["128k"]
    found = roofline.report(step, roofline.trace_step(step))
    assert found["planned_of_traced"] == pytest.approx(1, abs=0.1)
    assert found["traced_peak_gib"] * 2**30 < usable(80 * 10**9)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_attention_is_the_flash_kernel_in_half_precision(roofline, precision) -> None:
    """All samples in one launch, its products in bfloat16; the plain kernel is for float32 alone."""
    step = replace(small(roofline), precision=precision)
    trace = roofline.trace_step(step)
    names = {name for _, name in trace.by_operation}
    half = precision == "bfloat16"
    assert ("_flash_attention_forward" in names) == half
    assert ("_flash_attention_backward" in names) == half
    assert not any("scaled_dot_product" in name or "softmax" in name for name in names)
    assert trace.by_kind["attention"].kernels == (2 * step.ttt_steps if half else 0)
    # All matrix products of a bfloat16 step have bfloat16 factors.
    assert trace.product_dtypes == {torch.bfloat16 if half else torch.float32}
