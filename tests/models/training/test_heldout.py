"""Acceptance on held-out text while training: what a benchmark would say, and nothing of training is disturbed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.files.run_folder import RunFolder
from infra.records.data_path import HELDOUT_LENGTH, TrainingResult
from models.capture.heldout import read_heldout, wanted
from models.data.prompts import heldout_prompts
from models.decoding.acceptance import acceptance_length
from models.decoding.plain import continue_greedily
from models.decoding.simulated import features
from models.decoding.speculative import speculate
from models.export.sglang import export_checkpoint, load_draft
from models.run import PreparedRun
from models.targets.model import TargetModel
from models.training.heldout import weights_of

SMALL = ["data.max_samples=36", "data.max_tokens=64", "training.samples_per_step=4", "training.log_steps=1"]
PROMPTS, NEW_TOKENS, EVERY = 3, 20, 3
MEASURED = [
    *SMALL,
    "training.checkpoint_steps=2",
    f"training.heldout_steps={EVERY}",
    f"training.heldout_prompts={PROMPTS}",
    "benchmark.prompt_tokens=16",
    f"benchmark.max_new_tokens={NEW_TOKENS}",
]


def lines(folder: RunFolder) -> list[dict]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def weights(folder: RunFolder, name: str = "draft.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder.path / TrainingResult.read(folder.training).checkpoint / name)


@pytest.mark.slow
def test_it_is_what_decoding_gives_and_training_is_not_disturbed(
    make_run, finished_run, run_to_the_end, kill_at_checkpoint, hold_back
):
    """A run that is measured, and killed between two measurements, against one that is not."""
    measured, plain = (
        make_run("measured", *MEASURED, "ledger.lease_seconds=3600"),
        finished_run(*MEASURED, "training.heldout_steps=0"),
    )
    with hold_back(measured, range(24, 36)):
        kill_at_checkpoint(measured, 4)
    run_to_the_end(measured)
    assert [row["step"] for row in lines(measured) if HELDOUT_LENGTH in row] == [3, 6, 9]
    assert not any(HELDOUT_LENGTH in row for row in lines(plain))
    assert not plain.heldout.exists()
    for name in ("draft.safetensors", "averaged.safetensors"):
        mine, theirs = weights(measured, name), weights(plain, name)
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs), name
    assert [row["loss"] for row in lines(measured)] == [row["loss"] for row in lines(plain)]
    check_texts(measured)
    check_last_length(measured)


def check_texts(folder: RunFolder) -> None:
    """The target's own text to the benchmark's first prompts, with its features."""
    run = PreparedRun.open(folder.path)
    target = TargetModel.load(Path(run.target.path), run.config.target.aux_layer_ids, torch.float32)
    texts = read_heldout(folder.heldout)
    assert texts is not None
    prompts = heldout_prompts(run.open_samples("heldout"), run.config.benchmark)
    assert [list(text.prompt) for text in texts] == prompts[:PROMPTS]
    for text in texts:
        assert list(text.continuation) == continue_greedily(target, text.prompt, NEW_TOKENS, frozenset([1]))
        expected = features(target, [*text.prompt, *text.continuation])
        assert (text.aux - expected).abs().max() < 1e-4


def check_last_length(folder: RunFolder) -> None:
    """That of real decoding with the exported draft, whose weights are the averaged ones."""
    run = PreparedRun.open(folder.path)
    path, checkpoint = Path(run.target.path), folder.path / TrainingResult.read(folder.training).checkpoint
    export_checkpoint(checkpoint, path, folder.export, {})
    draft = load_draft(folder.export, path, torch.float32)
    target = TargetModel.load(path, run.config.target.aux_layer_ids, torch.float32)
    lookahead, ends = run.config.benchmark.lookahead, frozenset([1])
    decoded = [
        speculate(target, draft, list(text.prompt), lookahead, NEW_TOKENS, ends).counts
        for text in read_heldout(folder.heldout) or []
    ]
    assert lines(folder)[-1][HELDOUT_LENGTH] == acceptance_length(decoded)


def test_a_run_too_short_to_be_measured_makes_no_texts(make_run):
    assert not wanted(PreparedRun.open(make_run("short", *MEASURED, "training.heldout_steps=10").path))
    assert wanted(PreparedRun.open(make_run("long", *MEASURED, "training.heldout_steps=9").path))


def fail_in_the_middle(draft: torch.nn.Module) -> None:
    zeros = {name: torch.zeros_like(parameter) for name, parameter in draft.named_parameters()}
    with weights_of(draft, zeros, torch.device("cpu")):  # type: ignore[arg-type]
        assert not any(p.any() for p in draft.parameters())
        raise RuntimeError("in the middle")


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_weights_mode_and_randomness_as_they_are(training):
    torch.manual_seed(1)
    draft = torch.nn.Linear(3, 3).train(training)
    before = {name: (p.data_ptr(), p.clone()) for name, p in draft.named_parameters()}
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_the_middle(draft)
    for name, parameter in draft.named_parameters():
        assert (parameter.data_ptr(), parameter.tolist()) == (before[name][0], before[name][1].tolist())
    assert draft.training is training
    assert torch.equal(torch.get_rng_state(), random)
