"""Streamed training: equal to training in memory, exactly once, and resumed without a trace. Real processes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.records import Progress, TrainingResult
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import Run, epoch_order
from models.targets.model import TargetModel
from models.targets.weights import read_target_head
from models.training.lightning_module import DraftModule

SMALL = ["data.max_samples=36", "data.max_tokens=64", "training.samples_per_step=4", "training.log_steps=1"]


def generator(folder, index: int = 0) -> subprocess.Popen:
    command = [sys.executable, "-m", "models.capture.generator", str(folder.path), "--index", str(index)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def trainer(folder, ranks: int = 1) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, "-m", "models.training.trainer", str(folder.path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_to_the_end(folder) -> None:
    processes = [generator(folder), trainer(folder)]
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def final_weights(folder) -> dict[str, torch.Tensor]:
    result = TrainingResult.read(folder.training)
    return load_file(folder.path / result.checkpoint / "draft.safetensors")


def train_in_memory(run: Run) -> list[float]:
    """The same training with captures held in memory and a plain loop."""
    settings, samples = run.config.training, run.open_samples()
    path = Path(run.target.path)
    target = TargetModel.load(path, run.config.target.aux_layer_ids, torch.float32)
    head = read_target_head(path, torch.float32)
    supervised = samples.tokens[samples.loss_mask.bool()].long()
    vocabulary = DraftVocabulary.by_frequency(
        torch.bincount(supervised, minlength=len(head.head)), run.config.draft.vocab_size
    )
    torch.manual_seed(run.config.seed)
    draft = build_draft(run.config.draft, head.embedding, vocabulary, run.config.target.aux_layer_ids)
    draft.start_from(head.head)
    projection = TargetProjection(head.head[vocabulary.target_ids], head.head, head.logit_scale, head.soft_cap)
    order = epoch_order(run.config.seed, 0, len(samples))
    steps = [order[i : i + settings.samples_per_step] for i in range(0, len(order), settings.samples_per_step)]
    module = DraftModule(draft, projection, settings, total_steps=len(steps))
    optimizer, scheduler = (lambda c: (c["optimizer"], c["lr_scheduler"]["scheduler"]))(module.configure_optimizers())
    collected = []
    for step in steps:
        chosen = [samples[index] for index in step]
        hidden = [target.forward(sample.tokens[None]) for sample in chosen]
        batch = PackedSamples(
            tokens=torch.cat([s.tokens for s in chosen]),
            loss_mask=torch.cat([s.loss_mask for s in chosen]),
            aux=torch.cat([h.aux[0] for h in hidden]),
            last=torch.cat([h.last[0] for h in hidden]),
            lengths=tuple(len(s.tokens) for s in chosen),
        )
        total = sum(int(s.loss_mask[2:].sum()) for s in chosen)
        loss = draft.loss(batch, projection, total, settings.loss_chunk_tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), settings.clip_norm)
        optimizer.step()
        scheduler.step()
        collected.append(loss.item())
    return collected


@pytest.fixture(scope="module")
def baseline(request):
    return {}


def test_streaming_equals_memory(make_run):
    folder = make_run("stream", *SMALL)
    run_to_the_end(folder)
    run = Run.open(folder.path)
    progress: Progress = run.open_ledger().progress()
    assert progress == Progress(consumed=36)
    assert not list(run.open_transport().keys())
    result = TrainingResult.read(folder.training)
    assert result.steps == 9
    assert result.tokens == run.samples.train_tokens
    assert losses(folder) == pytest.approx(train_in_memory(run), rel=1e-6)


def test_a_killed_and_resumed_run_equals_an_undisturbed_one(make_run):
    undisturbed = make_run("whole", *SMALL)
    run_to_the_end(undisturbed)
    folder = make_run("killed", *SMALL, "training.checkpoint_steps=3")
    first_generator, first = generator(folder), trainer(folder)
    checkpoint = folder.checkpoints / "step-000003"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in (first, first_generator):
        kill_tree(process.pid)
        process.communicate(timeout=30)
    before = Run.open(folder.path).open_ledger().progress()
    assert 0 < before.consumed + before.taken < 36
    run_to_the_end(folder)
    assert Run.open(folder.path).open_ledger().progress() == Progress(consumed=36)
    assert losses(folder) == losses(undisturbed)
    mine, theirs = final_weights(folder), final_weights(undisturbed)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and everything below it (torchrun's ranks lead sessions of their own)."""
    import psutil

    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        one.send_signal(signal.SIGKILL)


def test_a_bad_sample_is_quarantined_and_the_rest_is_trained(make_run):
    folder = make_run("bad", *SMALL)
    run = Run.open(folder.path)
    config = run.config.model_dump()
    # A tokenizer of another vocabulary: one sample holds a token that the target does not know.
    samples = load_file(Path(run.samples.path) / "train.safetensors")
    assert config["ledger"]["max_attempts"] == 3
    damaged = folder.path / "samples"
    write_damaged(Path(run.samples.path), damaged, samples)
    folder.samples.write_text(run.samples.model_copy(update={"path": str(damaged)}).model_dump_json())
    run_to_the_end(folder)
    ledger = Run.open(folder.path).open_ledger()
    assert ledger.progress() == Progress(consumed=35, quarantined=1, attempts=3)
    (bad,) = ledger.quarantined()
    assert bad.sample == 7
    assert "IndexError" in bad.error


def write_damaged(source: Path, folder: Path, samples: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    from infra.files import sha256_file

    samples["tokens"][int(samples["offsets"][7]) + 3] = 5000
    folder.mkdir()
    save_file(samples, folder / "train.safetensors")
    manifest = json.loads((source / "samples.json").read_text())
    manifest["train_sha256"] = sha256_file(folder / "train.safetensors")
    (folder / "samples.json").write_text(json.dumps(manifest))
