"""Who counts a benchmark's acceptance: the target's size against one device, its quantization, the recipe."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models import preflight
from models.benchmark.counter import why_engine_counts
from models.config.recipe import RunConfig
from models.run import RunWithTarget
from models.targets.weights import weight_bytes

GIB = 2**30


def run_of(config: RunConfig, target: TargetRecord, folder: Path, /, **changes: dict[str, Any]) -> RunWithTarget:
    """A run whose sections have these settings; `target` changes the record."""
    record = target.model_copy(update=changes.pop("target", {}))
    tree = config.model_dump(mode="json")
    for section, settings in changes.items():
        tree[section] |= settings
    return RunWithTarget(RunFolder(folder), RunConfig.model_validate(tree), record)


@pytest.fixture
def small_machine(tiny_target: TargetRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory is the target's weights."""
    sysconf, nbytes = os.sysconf, sum(file.stat().st_size for file in Path(tiny_target.path).glob("*.safetensors"))
    pages = nbytes // sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else sysconf(name))


SGLANG = {"engine": "sglang"}


def test_a_target_that_one_device_holds_is_decoded_by_the_reference(
    tiny_config: RunConfig, tiny_target: TargetRecord, tmp_path: Path
) -> None:
    run = run_of(tiny_config, tiny_target, tmp_path, generator=SGLANG)
    assert why_engine_counts(run, []) is None
    assert why_engine_counts(run, [0, 0]) is None, "the GPUs' memory is unknown"
    chosen = run_of(tiny_config, tiny_target, tmp_path, generator=SGLANG, benchmark={"counted_by": "engine"})
    assert why_engine_counts(chosen, []) == "benchmark.counted_by=engine"


def test_a_target_larger_than_one_gpu_is_counted_by_the_engine(
    tiny_config: RunConfig, tiny_target: TargetRecord, tmp_path: Path
) -> None:
    run = run_of(tiny_config, tiny_target, tmp_path, generator=SGLANG)
    needed = weight_bytes(Path(tiny_target.path), torch.float32)
    assert why_engine_counts(run, [int(needed / 0.89), GIB]) is None
    why = why_engine_counts(run, [GIB, int(needed / 0.91)])
    assert why is not None
    assert "in float32, one GPU has" in why
    half = run_of(tiny_config, tiny_target, tmp_path, generator=SGLANG, benchmark={"compute_dtype": "bfloat16"})
    assert why_engine_counts(half, [int(needed / 0.91)]) is None
    insisting = run_of(tiny_config, tiny_target, tmp_path, generator=SGLANG, benchmark={"counted_by": "reference"})
    assert why_engine_counts(insisting, [needed // 2]) is None


@pytest.mark.usefixtures("small_machine", "sglang_that_forks")
def test_a_target_that_nothing_here_decodes_is_refused_before_gpus_are_taken(
    tiny_config: RunConfig, tiny_target: TargetRecord, tmp_path: Path
) -> None:
    with pytest.raises(Refusal, match=r"this machine has .*; set generator\.engine=sglang"):
        preflight.check_settings(run_of(tiny_config, tiny_target, tmp_path))
    medusa = {"method": "medusa", "vocab_size": 1024}
    tree = run_of(tiny_config, tiny_target, tmp_path, generator=SGLANG)
    config = RunConfig.model_validate(tree.config.model_dump(mode="json") | {"draft": medusa})
    with pytest.raises(Refusal, match="SGLang would count its acceptance, and it serves no"):
        preflight.check_settings(RunWithTarget(tree.folder, config, tree.target))
    preflight.check_settings(tree)


@pytest.mark.parametrize(
    ("changes", "quantization"),
    [
        ({"target": {"quantization": "fp8 128x128"}}, "fp8 128x128"),
        ({"generator": SGLANG | {"sglang": {"quantization": "fp8"}}}, "fp8"),
    ],
)
def test_a_target_served_in_another_precision_is_counted_by_the_engine(
    tiny_config: RunConfig, tiny_target: TargetRecord, tmp_path: Path, changes: dict[str, Any], quantization: str
) -> None:
    run = run_of(tiny_config, tiny_target, tmp_path, **({"generator": SGLANG} | changes))
    assert f"served in {quantization}" in (why_engine_counts(run, []) or "")
    insisting = run_of(
        tiny_config, tiny_target, tmp_path, **({"generator": SGLANG} | changes), benchmark={"counted_by": "reference"}
    )
    with pytest.raises(Refusal, match=f"counted_by=reference: the target is served in {quantization}"):
        why_engine_counts(insisting, [])


def test_the_plain_engine_says_that_it_cannot_capture_a_quantized_target(
    tiny_config: RunConfig, tiny_target: TargetRecord, tmp_path: Path
) -> None:
    run = run_of(tiny_config, tiny_target, tmp_path, target={"quantization": "modelopt NVFP4"})
    with pytest.raises(Refusal, match=r"quantized \(modelopt NVFP4\).*set generator\.engine=sglang"):
        preflight.check_settings(run)
