"""Like is compared with like: precision of the target, and who counted."""

import pytest
from prefect.logging import disable_run_logger

from infra.records.acceptance import BenchmarkResult, RegisteredDraft
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from tasks.benchmark import _comparable, tell_of_change
from tasks.run import OpenRun


def test_a_champion_of_another_precision_is_not_compared(
    run: OpenRun, draft: RegisteredDraft, target: TargetRecord
) -> None:
    assert draft.tags["target_quantization"] == ""
    assert draft.tags["capture_kernels"] == "transformers 5, float32"
    fp8 = draft.model_copy(update={"tags": {**draft.tags, "target_quantization": "fp8 128x128"}})
    quantized = target.model_copy(update={"quantization": "fp8 128x128"})
    with disable_run_logger():
        assert _comparable(run, draft, target)
        assert _comparable(run, fp8, quantized)
        assert not _comparable(run, draft, quantized)
        assert not _comparable(run, fp8, target)


def test_a_nightly_figure_by_another_counter_is_not_compared(draft: RegisteredDraft, result: BenchmarkResult) -> None:
    assert draft.tags["counted_by"] == "reference"
    engine = result.conditions.model_copy(update={"engine": "sglang 0.5.23"})
    told = "was benchmarked by reference, and tonight sglang 0.5.23 counted"
    with pytest.raises(Refusal, match=told):
        tell_of_change.fn(draft, result.model_copy(update={"conditions": engine}), 0.05)


def test_a_nightly_figure_on_other_prompts_is_no_change(draft: RegisteredDraft, result: BenchmarkResult) -> None:
    """A source that grows gives other held-out prompts: neither engine nor hardware is to blame."""
    moved = draft.model_copy(update={"acceptance_length": 2 * result.length})
    with disable_run_logger(), pytest.raises(Refusal, match="look at what has changed in engine, driver or hardware"):
        tell_of_change.fn(moved, result, 0.05)
    moved = moved.model_copy(update={"tags": {**draft.tags, "dataset_hash": "another"}})
    with disable_run_logger():
        said = tell_of_change.fn(moved, result, 0.05)
        assert "the lengths are not compared, because the text is another by now" in said
        mismatch = result.lossless.model_copy(update={"mismatches": 1})
        with pytest.raises(Refusal, match="1 mismatches"):
            tell_of_change.fn(moved, result.model_copy(update={"lossless": mismatch}), 0.05)
