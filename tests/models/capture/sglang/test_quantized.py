"""A real SGLang with a target in fp8: what is captured, and how a draft, which is not quantized, is benchmarked."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantizers import fp8_blocks, linear_modules, quantize

from infra.files.atomic import write_atomically
from infra.records.data_path import TargetRecord
from infra.records.drafts import CapturePrecision
from infra.refusal import Refusal
from models.benchmark.contestants import load_contestants
from models.benchmark.run import benchmark_run
from models.capture.sglang.engine import SGLangEngine
from models.config.target import TargetConfig
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.serving_settings import SERVING, SGLANG
from models.export.sglang import write_export
from models.run import PreparedRun
from models.targets.prepare import prepare_target
from models.targets.weights import read_target_head

SIZE = 32
OVERRIDES = (
    *("generator.compute_dtype=bfloat16", "generator.stored_dtype=float8", "benchmark.compute_dtype=bfloat16"),
    *("benchmark.prompts=6", "benchmark.max_new_tokens=12", "benchmark.served_concurrency=[2]"),
    *("draft.num_heads=4", "draft.num_kv_heads=2"),
)


@pytest.fixture
def fp8_target(qwen3_target: TargetRecord, tmp_path: Path) -> TargetRecord:
    """All linear layers in fp8 blocks, activations quantized as they come.

    A Qwen3: SGLang 0.5.23's Llama leaves `weight_scale_inv` out, and its states are not finite then.
    """
    folder = Path(shutil.copytree(qwen3_target.path, tmp_path / "fp8"))
    settings = {"quant_method": "fp8", "weight_block_size": [SIZE, SIZE], "activation_scheme": "dynamic"}
    quantize(folder, linear_modules(folder), lambda weight: fp8_blocks(weight, SIZE), settings)
    return prepare_target(TargetConfig(name=str(folder), aux_layer_ids=(0, 1, 2)))


def export(run: PreparedRun, folder: Path, precision: CapturePrecision) -> Path:
    """An untrained draft that says at which precision it was trained."""
    torch.manual_seed(0)
    path, config = Path(run.target.path), run.config
    head = read_target_head(path, torch.float32)
    draft = build_draft(
        config.draft, head.embedding, DraftVocabulary(torch.arange(1024), 1024), config.target.aux_layer_ids
    )
    draft.start_from(head.head)
    extra = {"target_revision": run.target.revision, "precision": precision.model_dump(), "step": 1}
    write_export(draft, folder, extra, read_served_target(path))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_target_in_fp8_is_captured_and_counted_as_it_is_served(
    sglang_run: Callable[..., PreparedRun],
    engine_of: Callable[..., SGLangEngine],
    fp8_target: TargetRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    run = sglang_run(*OVERRIDES, target=fp8_target)
    engine = engine_of(run)
    engine.check_canary(run.open_samples()[0].tokens[:32])
    with monkeypatch.context() as patched:
        patched.setattr("models.capture.sglang.engine.LOADED_BYTES", 0)
        engine.check_canary(run.open_samples()[0].tokens[:32])
    assert "canary: reading 0 GiB of weights, to compare the chosen layers" in capsys.readouterr().out
    precision = engine.precision()
    assert precision.quantization == "fp8 32x32"
    assert precision.how == "sglang 0.5.23, bfloat16, attention_backend torch_native"
    engine.close()

    write_atomically(run.folder.precision, precision)
    export(run, run.folder.export, precision)
    result = benchmark_run(run, None, "champion")
    assert result.conditions.engine == "sglang 0.5.23"
    assert result.conditions.quantization == "fp8 32x32"
    assert (result.reference, result.sampled, result.gap) == (None, None, None)
    assert result.acceptance.conversations == 6
    assert result.lossless.tokens > 0
    assert result.lossless.mismatches == 0
    log = (run.folder.logs / "sglang-serving-draft.log").read_text()
    assert "'_speculative_draft_quantization_explicitly_set': True" in log
    assert "--speculative-draft-model-quantization unquant" in (run.folder.export / "README.md").read_text()
    assert '"unquant"' in (run.folder.export / SERVING / SGLANG).read_text()

    with pytest.raises(Refusal, match=r"is quantized \(fp8 32x32\).*counted by SGLang"):
        load_contestants(Path(run.target.path), [run.folder.export], torch.float32)
    other = export(run, tmp_path / "champion", precision.model_copy(update={"quantization": None}))
    with pytest.raises(Refusal, match="floating-point numbers, and here the target is in fp8 32x32"):
        benchmark_run(run, other, "version 1")
