"""Tiny targets of MiMo's and GLM-4.5's layouts: MTP layers trained further, written back, served by SGLang's NEXTN."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.acceptance import BenchmarkResult, ServedResult
from models.benchmark.served import counts_of, setup_of
from models.data.prompts import heldout_prompts
from models.decoding.acceptance import acceptance_length
from models.decoding.speculative import speculate_together
from models.drafts.mtp.module import MtpDraft
from models.export.sglang import load_draft
from models.run import PreparedRun
from models.targets.model import TargetModel, eos_ids
from models.targets.prepare import prepare_target
from models.targets.weights import read_target_head
from models.training.start import first_draft

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from mimo import INDEX, PREFIX, SHARDS, write_mimo
from mtp_families import write_with_layer

LOOKAHEAD = 3
OWN_TEXT = ("data.regeneration={temperature: 0.0, prompt_tokens: 8, max_new_tokens: 56}", "training.epochs=4")
"""What a target of random weights writes is all that a draft can learn of it."""


def mtp_run(make_run: Callable[..., RunFolder], place: Path, *more: str) -> PreparedRun:
    folder = make_run(
        "mtp", "target.source=huggingface", f"target.name={place}", "target.aux_layer_ids=[]", "data.max_samples=400",
        'draft={"method":"mtp"}', f"benchmark.lookahead={LOOKAHEAD}", "benchmark.prompts=16",
        "benchmark.max_new_tokens=48", "benchmark.served_concurrency=[4]", "promotion.traffic.sampling=greedy",
        'generator.sglang.arguments=["--trust-remote-code"]', *more,
    )  # fmt: skip
    run = PreparedRun.open(folder.path)
    write_atomically(folder.target, prepare_target(run.config.target))
    return PreparedRun.open(folder.path)


@pytest.fixture
def mimo_run(make_run, tiny_target, tmp_path) -> PreparedRun:
    return mtp_run(make_run, write_mimo(Path(tiny_target.path), tmp_path / "mimo"))


def test_training_starts_from_the_targets_own_layer(mimo_run):
    draft, covered = first_draft(mimo_run, read_target_head(Path(mimo_run.target.path), torch.float32))
    stored = load_file(Path(mimo_run.target.path) / SHARDS[1])
    assert isinstance(draft, MtpDraft)
    assert covered == 1.0
    assert torch.equal(draft.fc.weight, stored[f"{PREFIX}input_proj.weight"])
    for name, tensor in draft.target_tensors().items():
        assert torch.equal(tensor, stored[name]), name


@pytest.fixture
def trained(mimo_run, run_to_the_end, start, monkeypatch) -> PreparedRun:
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    run_to_the_end(mimo_run.folder)
    finish(start, mimo_run, "models.export.sglang")
    return mimo_run


def finish(start: Callable[..., Any], run: PreparedRun, module: str) -> None:
    process = start(module, run.folder)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_trained_layer_is_written_back_and_served(trained):
    check_stitched(Path(trained.target.path), trained.folder.stitched)
    check_served(trained, trained.folder.stitched)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_an_exported_layer_is_benchmarked_and_served_like_any_draft(trained, start):
    finish(start, trained, "models.benchmark.served")
    finish(start, trained, "models.benchmark.run")
    result, served = BenchmarkResult.read(trained.folder.benchmark), ServedResult.read(trained.folder.served)
    assert (result.lossless.mismatches, result.counts_identical, result.gap) == (0, True, 0)
    assert result.acceptance.length[LOOKAHEAD] > 1.6
    assert served.same_text == result.acceptance.conversations
    assert served.length == pytest.approx(result.acceptance.length[LOOKAHEAD], rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_trained_layer_with_experts_is_served(make_run, tiny_target, tmp_path, run_to_the_end, start, monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    target = write_with_layer("glm4_moe", tmp_path / "glm", Path(tiny_target.path))
    run = mtp_run(make_run, target, *OWN_TEXT)
    for module in ("models.regeneration.regenerate", "models.data.prepare"):
        finish(start, run, module)
    run_to_the_end(run.folder)
    finish(start, run, "models.export.sglang")
    check_served(PreparedRun.open(run.folder.path), run.folder.stitched, least=1.05)


def check_stitched(target: Path, stitched: Path) -> None:
    """Every file but the one with the layer is the target's own, and so is every other tensor."""
    assert {path.name for path in stitched.iterdir()} == {path.name for path in target.iterdir()}
    for path in stitched.iterdir():
        assert os.path.samefile(path, target / path.name) == (path.name != SHARDS[1])
    before, after = load_file(target / SHARDS[1]), load_file(stitched / SHARDS[1])
    changed = {
        name for name in before if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    }
    assert before.keys() == after.keys()
    assert changed == {name for name in before if name.startswith(PREFIX)}
    assert set(json.loads((stitched / INDEX).read_text())["weight_map"]) >= changed


def check_served(run: PreparedRun, stitched: Path, least: float = 1.6) -> None:
    """As people serve it: one folder for target and draft. Steps are those of the reference decoder."""
    target, draft = (
        TargetModel.load(stitched, (), torch.float32),
        load_draft(run.folder.export, stitched, torch.float32),
    )
    prompts = heldout_prompts(run.open_samples("heldout"), run.config.benchmark)
    most, ends = run.config.benchmark.max_new_tokens, eos_ids(stitched)
    decoded = speculate_together(target, draft, prompts, LOOKAHEAD, most, ends)
    setup = setup_of(run)
    arguments = (*setup.generator.sglang.arguments, "--speculative-draft-model-path", str(stitched))
    arguments += tuple(run.config.draft.engine_arguments(LOOKAHEAD))
    sglang = setup.generator.sglang.model_copy(update={"arguments": arguments})
    setup = replace(setup, target=stitched, generator=setup.generator.model_copy(update={"sglang": sglang}))
    with setup.serving(None, LOOKAHEAD) as client:
        answers = setup.watch_all(client, prompts)
    assert acceptance_length([ours.counts for ours in decoded]) > least
    for answer, ours in zip(answers, decoded, strict=True):
        assert answer.tokens == list(ours.tokens)
        assert counts_of(answer, LOOKAHEAD, ends) == ours.counts
