"""Streamed training: equal to training in memory, exactly once, and resumed without a trace. Real processes."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import load_file, save_file

from infra.files.atomic import sha256_file
from infra.ledger.schema import samples
from infra.records.data_path import ObjectRecord, SampleProgress, TrainingResult
from infra.transport.choice import objects_folder
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import PreparedRun, epoch_order
from models.targets.model import TargetModel
from models.targets.weights import read_target_head
from models.training.lightning_module import DraftModule

# A pruned vocabulary, so that the target's top tokens travel too.
SMALL = [
    "draft.vocab_size=700",
    "data.max_samples=36",
    "data.max_tokens=64",
    "training.samples_per_step=4",
    "training.log_steps=1",
]


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def final_weights(folder) -> dict[str, torch.Tensor]:
    result = TrainingResult.read(folder.training)
    return load_file(folder.path / result.checkpoint / "draft.safetensors")


def train_in_memory(run: PreparedRun) -> list[float]:
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
    projection = TargetProjection(head.head[vocabulary.target_ids], None, head.logit_scale, head.soft_cap)
    order = epoch_order(run.config.seed, 0, len(samples))
    steps = [order[i : i + settings.samples_per_step] for i in range(0, len(order), settings.samples_per_step)]
    module = DraftModule(draft, projection, settings, total_steps=len(steps))
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
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
            top=torch.cat([target.top_tokens(h.last[0]) for h in hidden]),
        )
        total = sum(int(s.loss_mask[2:].sum()) for s in chosen)
        loss = draft.loss(batch, projection, total, 256).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), settings.clip_norm)
        optimizer.step()
        scheduler.step()
        collected.append(loss.item())
    return collected


@pytest.fixture
def undisturbed(finished_run):
    """What disturbed runs must equal."""
    return finished_run(*SMALL)


def test_streaming_equals_memory(undisturbed):
    folder = undisturbed
    run = PreparedRun.open(folder.path)
    progress: SampleProgress = run.open_ledger().progress()
    assert progress == SampleProgress(consumed=36)
    result = TrainingResult.read(folder.training)
    assert result.steps == 9
    assert result.tokens == run.samples.train_tokens
    learned = run.open_samples().tokens[run.open_samples().loss_mask.bool()]
    counts = torch.bincount(learned.long()).sort(descending=True).values
    assert result.token_coverage == pytest.approx(int(counts[: run.config.draft.vocab_size].sum()) / len(learned))
    assert losses(folder) == pytest.approx(train_in_memory(run), rel=1e-6)


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_undisturbed_one(
    make_run, undisturbed, run_to_the_end, kill_at_checkpoint, hold_back
):
    folder = make_run("killed", *SMALL, "training.checkpoint_steps=3", "ledger.lease_seconds=3600")
    with hold_back(folder, range(28, 36)):
        kill_at_checkpoint(folder, 3)
    before = PreparedRun.open(folder.path).open_ledger().progress()
    assert 0 < before.consumed + before.taken < 36
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 4, "lo\0\0\0')  # as a machine leaves it that dies while the line is written
    run_to_the_end(folder)
    assert PreparedRun.open(folder.path).open_ledger().progress() == SampleProgress(consumed=36)
    assert losses(folder) == losses(undisturbed)
    mine, theirs = final_weights(folder), final_weights(undisturbed)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_bfloat16_follows_float32(make_run, undisturbed, run_to_the_end):
    exact, rounded = undisturbed, make_run("bfloat16", *SMALL, "training.precision=bfloat16")
    run_to_the_end(rounded)
    assert losses(rounded) == pytest.approx(losses(exact), rel=0.02)
    assert losses(rounded) != losses(exact)


@pytest.mark.slow
def test_generators_come_and_go(make_run, start):
    """Three generators: one stops on request, one is killed midway, and nothing is lost."""
    folder = make_run("several", *SMALL, "data.max_samples=120", "ledger.lease_seconds=5")
    trainer = start("models.training.launch", folder, ranks=1)
    stopped, killed, staying = [start("models.capture.generator", folder, index=index) for index in range(3)]
    assert any("ready" in line for line in stopped.stdout), "told to stop earlier, it is just not there yet"
    deadline = time.monotonic() + 300
    while not folder.metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    stopped.terminate()
    killed.kill()
    output, _ = stopped.communicate(timeout=400)
    assert stopped.returncode == 0, output
    for process in (trainer, staying):
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
    assert PreparedRun.open(folder.path).open_ledger().progress() == SampleProgress(consumed=120)
    assert losses(folder) == pytest.approx(train_in_memory(PreparedRun.open(folder.path)), rel=1e-6)


@pytest.mark.parametrize("first", ["generator", pytest.param("trainer", marks=pytest.mark.long)])
def test_bytes_held_never_exceed_the_budget(make_run, start, first):
    """A generator that is far ahead of the trainer fills the store and waits; one that is behind is waited for."""
    folder = make_run("bounded", *SMALL, "transport.budget_mib=3", "generator.lease_samples=1")
    ledger, held, processes = with_its_first_epoch(folder), [0], []
    if first == "trainer":
        processes.append(start("models.training.launch", folder, ranks=1))
    processes.append(start("models.capture.generator", folder))
    deadline = time.monotonic() + 300
    while first == "generator" and held[-1] < 2.5 * 2**20 and time.monotonic() < deadline:
        held.append(ledger.progress().bytes_held)
        time.sleep(0.01)
    if first == "generator":
        processes.append(start("models.training.launch", folder, ranks=1))
    while any(process.poll() is None for process in processes):
        held.append(ledger.progress().bytes_held)
        time.sleep(0.05)
    assert [process.returncode for process in processes] == [0, 0]
    assert ledger.progress() == SampleProgress(consumed=36)
    assert max(held) <= 3 * 2**20


@pytest.mark.slow
def test_a_lost_ledger_is_rebuilt_from_the_checkpoint(
    make_run, undisturbed, run_to_the_end, kill_at_checkpoint, hold_back
):
    kept = ("training.checkpoint_steps=3", "training.keep_checkpoints=9", "ledger.lease_seconds=3600")
    folder = make_run("lost", *SMALL, *kept)
    with hold_back(folder, range(28, 36)):
        kill_at_checkpoint(folder, 3)
    for file in folder.path.glob("ledger.sqlite*"):
        file.unlink()
    # A checkpoint that does not verify is not the one to rebuild from.
    torn = shutil.copytree(folder.checkpoint(3, 1), folder.checkpoint(1_000_000, 1))
    (torn / "draft.safetensors").write_bytes(b"torn")
    run_to_the_end(folder)
    ledger = PreparedRun.open(folder.path).open_ledger()
    assert ledger.progress() == SampleProgress(consumed=36)
    assert losses(folder) == losses(undisturbed)
    mine, theirs = final_weights(folder), final_weights(undisturbed)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_stored_hidden_states_are_captured_once(make_run, undisturbed, run_to_the_end, tmp_path):
    """The offline mode: the same losses as streamed, and another run of the same text finds everything."""
    kept = tmp_path / "kept"
    stored = [*SMALL, "transport.kind=stored", f"transport.folder={kept}"]
    first, second = make_run("first", *stored), make_run("second", *stored)
    run_to_the_end(first)
    written = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert len(written) == 2 * 36
    run_to_the_end(second)
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == written
    assert losses(first) == losses(second) == losses(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cut", "message", "ranks"),
    [
        ("arena", False, "checksum of aux does not match", 1),
        pytest.param("files", True, "another size than its record says", 1, marks=pytest.mark.long),
        ("files", True, "another size than its record says", 2),  # which share every sample
    ],
)
def test_a_damaged_object_is_captured_again(make_run, undisturbed, start, hold_back, kind, cut, message, ranks):
    """While training goes on, the last captured object is damaged where it lies: the same losses, and no restart."""
    settings = (f"transport.kind={kind}", "training.prefetch_steps=1", "ledger.lease_seconds=3600")
    shared = (f"training.ranks={ranks}", f"training.context_parallel_size={ranks}")
    folder = make_run("damaged", *SMALL, *settings, *shared)
    # The trainer cannot get to the last object before it is damaged.
    with hold_back(folder, range(16, 20)) as (ledger, _):
        generator = start("models.capture.generator", folder)
        deadline = time.monotonic() + 300
        while ledger.progress().ready < 32 and time.monotonic() < deadline:
            time.sleep(0.05)
        trainer = start("models.training.launch", folder, ranks=ranks)
        while not ledger.progress().taken and time.monotonic() < deadline:
            time.sleep(0.005)
        damage(folder, last_object(ledger), cut)
    for process in (generator, trainer):
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
    assert "is captured again: run/" in output.replace(folder.path.name, "run")
    assert message in output
    assert ledger.progress() == SampleProgress(consumed=36)
    assert losses(folder) == (losses(undisturbed) if ranks == 1 else pytest.approx(losses(undisturbed), rel=1e-4))


def with_its_first_epoch(folder):
    """The run's ledger, in which generators find work before any trainer is there."""
    run = PreparedRun.open(folder.path)
    ledger = run.open_ledger()
    ledger.open_epoch(None, 0, run.epoch_slots(0))
    return ledger


def last_object(ledger) -> ObjectRecord:
    query = sa.select(samples.c.object).where(samples.c.ordinal == 35)
    with ledger.read() as rows:
        return ObjectRecord.model_validate_json(rows.scalar(query))


def damage(folder, record: ObjectRecord, cut: bool) -> None:
    objects = objects_folder(PreparedRun.open(folder.path).config.transport, folder)
    if cut:
        os.truncate(objects / record.location, record.nbytes - 1)
        return
    with (objects / "arena").open("r+b") as arena:
        arena.seek(int(record.location.partition("+")[0]))
        (byte,) = arena.read(1)
        arena.seek(-1, os.SEEK_CUR)
        arena.write(bytes([byte ^ 1]))


def test_a_bad_sample_is_quarantined_and_the_rest_is_trained(make_run, run_to_the_end):
    folder = make_run("bad", *SMALL)
    run = PreparedRun.open(folder.path)
    assert run.config.ledger.max_attempts == 2
    poisoned = poison_target(Path(run.target.path), folder.path / "target")
    folder.target.write_text(run.target.model_copy(update={"path": str(poisoned)}).model_dump_json())
    damaged = poison_sample(Path(run.samples.path), folder.path / "samples", 7)
    folder.samples.write_text(run.samples.model_copy(update={"path": str(damaged)}).model_dump_json())
    run_to_the_end(folder)
    ledger = PreparedRun.open(folder.path).open_ledger()
    assert ledger.progress() == SampleProgress(consumed=35, quarantined=1, attempts=2)
    (bad,) = ledger.quarantined()
    assert bad.sample == 7
    assert "not finite" in bad.error


def test_samples_of_another_tokenizer_are_refused(make_run, start):
    folder = make_run("other", *SMALL)
    run = PreparedRun.open(folder.path)
    damaged = poison_sample(Path(run.samples.path), folder.path / "samples", 7, token=5000)
    folder.samples.write_text(run.samples.model_copy(update={"path": str(damaged)}).model_dump_json())
    output, _ = start("models.training.launch", folder, ranks=1).communicate(timeout=400)
    assert "error: the samples hold token 5000, the target knows 1024" in output


POISON = 1  # end of text, which no sample holds


def poison_target(source: Path, folder: Path) -> Path:
    """A copy of the target whose embedding of one token is not a number."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def poison_sample(source: Path, folder: Path, index: int, token: int = POISON) -> Path:
    """A copy of the sample set with one token of one sample changed."""
    shutil.copytree(source, folder)
    samples = load_file(folder / "train.safetensors")
    samples["tokens"][int(samples["offsets"][index]) + 3] = token
    save_file(samples, folder / "train.safetensors")
    manifest = json.loads((folder / "samples.json").read_text())
    (folder / "samples.json").write_text(
        json.dumps(manifest | {"train_sha256": sha256_file(folder / "train.safetensors")})
    )
    return folder
