"""The tiny target, from samples to benchmark: what a draft learns there, and 6,000 lossless tokens."""

from pathlib import Path

import pytest
import torch

from infra.records.acceptance import BenchmarkResult
from models.data.prompts import take_prompts
from models.decoding.plain import continue_batch
from models.decoding.simulated import features, simulate
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import PreparedRun
from models.targets.model import TargetModel
from models.targets.weights import read_target_head

LOOKAHEAD = 4


@pytest.fixture
def finished(make_run, run_to_the_end, start, monkeypatch):
    """A run of recipes/tiny.yaml up to its benchmarks: 6,000 tokens decoded for real, and as many served by SGLang."""
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    folder = make_run(
        "tiny", "benchmark.prompts=96", "benchmark.reference_tokens=6000", "benchmark.served_concurrency=[4]"
    )
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
    assert result.lossless.tokens >= 6000
    assert result.lossless.mismatches == 0
    assert result.counts_identical
    assert result.gap == 0
    assert result.target_distinct_token_share > 0.25
    assert result.acceptance.length[LOOKAHEAD] >= 2.5
    assert result.acceptance.length[LOOKAHEAD] > result.prompt_lookup.length[LOOKAHEAD]
    assert result.gate.passed
    assert result.served.same_text == result.served.acceptance.conversations == result.acceptance.conversations
    assert result.served.length == pytest.approx(result.acceptance.length[LOOKAHEAD], rel=0.05)
    assert untrained_length(finished) <= 1.1


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
    prompts = take_prompts(samples, 24, run.config.benchmark.prompt_tokens)
    tokens = steps = 0
    for prompt, continuation in zip(prompts, continue_batch(target, prompts, 64, 0.0, frozenset()), strict=True):
        counts = simulate(draft, prompt, continuation, features(target, [*prompt, *continuation]), LOOKAHEAD)[-1]
        tokens, steps = tokens + counts.tokens, steps + counts.steps
    return tokens / steps
