"""The tiny target, from samples to benchmark: what a draft learns there, and 2,000 lossless tokens."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.acceptance import BenchmarkResult, GateEvidence, RequestCounts
from models.benchmark.run import benchmark_run
from models.benchmark.smoke import smoke_test
from models.data.prompts import take_prompts
from models.decoding.continuations import continue_batch
from models.decoding.simulated import features, simulate
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import PreparedRun
from models.targets.model import TargetModel
from models.targets.weights import read_target_head, weight_bytes

LOOKAHEAD = 4


@pytest.fixture
def finished(make_run, run_to_the_end, start, monkeypatch):
    """A run of recipes/tiny.yaml up to its benchmarks: 2,000 tokens decoded for real, and as many served by SGLang."""
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    folder = make_run(
        "tiny", "data.max_samples=800", "benchmark.prompts=32", "benchmark.reference_tokens=2000",
        "benchmark.served_concurrency=[4]",
        "promotion.traffic.sampling=greedy",  # what an engine's counts are of
    )  # fmt: skip
    run_to_the_end(folder)
    for module in ("models.export.sglang", "models.benchmark.served", "models.benchmark.run"):
        process = start(module, folder)
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
    return PreparedRun.open(folder.path)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_draft_learns_and_decoding_is_lossless(finished):
    result = BenchmarkResult.read(finished.folder.benchmark)
    assert result.lossless.tokens >= 2000
    assert result.lossless.mismatches == 0
    assert result.counts_identical
    assert result.gap == 0
    assert result.target_distinct_token_share > 0.25
    assert result.acceptance.length[LOOKAHEAD] >= 2.0
    assert result.acceptance.length[LOOKAHEAD] > result.prompt_lookup.length[LOOKAHEAD]
    assert result.gate.passed
    assert result.served.same_text == result.served.acceptance.conversations == result.acceptance.conversations
    assert result.served.length == pytest.approx(result.acceptance.length[LOOKAHEAD], rel=0.05)
    assert untrained_length(finished) <= 1.1


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_target_that_no_machine_holds_is_counted_by_sglang(finished, tmp_path, monkeypatch):
    """The same run on a machine whose memory is too small for the reference decoder: the same counts."""
    run, by_reference = finished, BenchmarkResult.read(finished.folder.benchmark)
    weights, sysconf = weight_bytes(Path(run.target.path), torch.float32), os.sysconf
    pages = weights // sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else sysconf(name))
    folder = RunFolder(Path(shutil.copytree(run.folder.path, tmp_path / "small")))
    generator = run.config.generator.model_copy(update={"engine": "sglang"})
    write_atomically(folder.config, run.config.model_copy(update={"generator": generator}))
    small = PreparedRun.open(folder.path)
    result = benchmark_run(small, None, "champion")
    assert result.conditions.engine.startswith("sglang ")
    evidence, before = GateEvidence.read(folder.gate), GateEvidence.read(run.folder.gate)
    assert evidence.grounds[0].challenger == before.grounds[0].challenger
    assert evidence.gap is None
    assert result.gate.model_dump(exclude={"reason"}) == by_reference.gate.model_dump(exclude={"reason"})
    assert (result.lossless.tokens > 2000, result.lossless.mismatches) == (True, 0)
    assert result.acceptance.length == {LOOKAHEAD: by_reference.acceptance.length[LOOKAHEAD]}
    assert result.prompt_lookup == by_reference.prompt_lookup
    counts = RequestCounts.read(folder.request_counts)
    assert counts.greedy == {LOOKAHEAD: RequestCounts.read(run.folder.request_counts).greedy[LOOKAHEAD]}
    smoke = smoke_test(small, folder.export, counts)
    assert smoke.passed, smoke.reason


def untrained_length(run: PreparedRun) -> float:
    """Simulated acceptance length of the same draft before its first step."""
    path = Path(run.target.path)
    target = TargetModel.load(path, run.config.target.aux_layer_ids, torch.float32)
    head = read_target_head(path, torch.float32)
    torch.manual_seed(run.config.seed)
    vocabulary = DraftVocabulary(torch.arange(run.config.draft.vocab_size), len(head.head))
    draft = build_draft(run.config.draft, head.embedding, vocabulary, run.config.target.aux_layer_ids)
    draft.start_from(head.head)
    heldout = run.open_samples("heldout")
    samples = ((heldout[i].tokens, heldout[i].loss_mask) for i in range(len(heldout)))
    prompts = take_prompts(samples, 24, run.config.benchmark.prompt_tokens, "give more text")
    tokens = steps = 0
    for prompt, continuation in zip(prompts, continue_batch(target, prompts, 64, frozenset()), strict=True):
        aux = features(target, [*prompt, *continuation])
        counts = simulate(draft, prompt, continuation, aux, LOOKAHEAD, eos_ids=frozenset())[-1]
        tokens, steps = tokens + counts.tokens, steps + counts.steps
    return tokens / steps
