"""Checkpoints saved beside training: what was copied is what is written, in order, and errors are not lost."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger, StaleIncarnation
from infra.ledger.trainers import resume_run
from infra.records.data_path import CheckpointRecord
from models import checkpoint as checkpoints
from models.checkpoint import CheckpointSaver, on_host
from models.training.trainer import MACHINE_FAULTS

DESCRIPTION = checkpoints.DraftDescription(config={}, aux_layer_ids=(1,), target_vocab_size=8)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    return folder


@pytest.fixture
def ledger(folder: RunFolder) -> Ledger:
    ledger = Ledger.open(folder.ledger_url, folder.name)
    ledger.create_run(budget_bytes=1000, bytes_per_token=1, lease_seconds=60, max_attempts=3, order="strict")
    return ledger


def save(saver: CheckpointSaver, step: int, weight: torch.Tensor) -> None:
    state = checkpoints.TrainerState(optimizer={"state": {0: {"exp_avg": weight}}}, scheduler={}, counters={})
    saver.save(step, {checkpoints.WEIGHTS: {"weight": weight}, checkpoints.AVERAGED: {}}, state, DESCRIPTION)


def test_training_may_go_on_while_a_checkpoint_is_written(folder: RunFolder, ledger: Ledger) -> None:
    resume = resume_run(ledger, lambda _: True, lambda _: True)
    saver, weight = CheckpointSaver(folder, ledger, resume.incarnation, keep=2), torch.zeros(50_000)
    for step in range(1, 5):
        weight.fill_(step)
        save(saver, step, weight)
        weight.fill_(-1)
    saver.wait()
    assert [record.step for record in ledger.checkpoints()] == [1, 2, 3, 4]
    assert [path.name for path in sorted(folder.checkpoints.iterdir())] == ["step-000003-1", "step-000004-1"]
    for record in ledger.checkpoints()[-2:]:
        assert checkpoints.is_whole(folder, record)
        path = folder.path / record.path
        assert set(load_file(path / checkpoints.WEIGHTS)["weight"].tolist()) == {record.step}
        assert set(checkpoints.read_restored(path).state["optimizer"]["state"][0]["exp_avg"].tolist()) == {record.step}


def test_what_a_save_raised_is_raised_by_the_next_wait(folder: RunFolder, ledger: Ledger) -> None:
    resume = resume_run(ledger, lambda _: True, lambda _: True)
    saver = CheckpointSaver(folder, ledger, resume.incarnation, keep=2)
    folder.checkpoints.write_text("in the way")
    save(saver, 1, torch.zeros(2))
    with pytest.raises(OSError, match="checkpoints"):
        saver.wait()
    assert not ledger.checkpoints()


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """This process may write no larger file: what a full disk looks like to it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("weights", "optimizer"), [(100_000, 1), (1, 100_000)])
def test_a_full_disk_is_the_machines_fault_whichever_file_does_not_fit(
    folder: RunFolder, ledger: Ledger, weights: int, optimizer: int
) -> None:
    saver = CheckpointSaver(folder, ledger, 1, keep=1)
    state = checkpoints.TrainerState(optimizer={"state": torch.zeros(optimizer)}, scheduler={}, counters={})
    tensors = {checkpoints.WEIGHTS: {"weight": torch.zeros(weights)}}
    with largest_file(200_000), pytest.raises(MACHINE_FAULTS, match=r"step-000001-1.*cannot be written"):
        saver.write(1, tensors, state, DESCRIPTION)


def test_copies_share_no_memory() -> None:
    tensor = torch.ones(3, requires_grad=True)
    copied = on_host({"a": [tensor, (tensor, 1)], "b": "text"})
    with torch.no_grad():
        tensor.zero_()
    assert copied["b"] == "text"
    assert copied["a"][1][1] == 1
    assert copied["a"][0].tolist() == copied["a"][1][0].tolist() == [1.0, 1.0, 1.0]
    assert not copied["a"][0].requires_grad


def write(folder: RunFolder, ledger: Ledger, incarnation: int, step: int, value: float) -> CheckpointRecord:
    saver = CheckpointSaver(folder, ledger, incarnation, keep=1)
    state = checkpoints.TrainerState(optimizer={}, scheduler={}, counters={})
    return saver.write(step, {checkpoints.WEIGHTS: {"weight": torch.full((4,), value)}}, state, DESCRIPTION)


def test_a_trainer_whose_run_was_taken_over_replaces_nothing(folder: RunFolder, ledger: Ledger) -> None:
    old = resume_run(ledger, lambda _: True, lambda _: True)
    new = resume_run(ledger, lambda _: True, lambda _: True)
    record = write(folder, ledger, new.incarnation, 5, 1.0)
    ledger.commit(new.incarnation, record)
    late = write(folder, ledger, old.incarnation, 5, -1.0)
    with pytest.raises(StaleIncarnation):
        ledger.commit(old.incarnation, late)
    assert checkpoints.is_whole(folder, record)
    assert load_file(folder.path / record.path / checkpoints.WEIGHTS)["weight"].tolist() == [1.0] * 4
    checkpoints.remove_uncommitted(folder, ledger)
    assert list(folder.checkpoints.iterdir()) == [folder.path / record.path]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_checkpoints_are_kept_when_steps_gain_a_digit(folder: RunFolder, ledger: Ledger, keep: int) -> None:
    resume = resume_run(ledger, lambda _: True, lambda _: True)
    saver = CheckpointSaver(folder, ledger, resume.incarnation, keep)
    steps = (999_998, 999_999, 1_000_000)
    for step in steps:
        save(saver, step, torch.zeros(2))
    saver.wait()
    assert folder.checkpoint_folders() == [folder.checkpoint(step, resume.incarnation) for step in steps[-keep:]]


def test_checkpoint_folders_are_in_the_order_of_their_steps(folder: RunFolder) -> None:
    wanted = [folder.checkpoint(*name) for name in ((2, 9), (2, 10), (999_999, 1), (1_000_000, 1))]
    for path in reversed(wanted):
        path.mkdir(parents=True)
    (folder.checkpoints / ".step-000003-1.tmp").mkdir()
    (folder.checkpoints / "step-by-step").mkdir()
    assert folder.checkpoint_folders() == wanted


def test_an_uncommitted_checkpoint_is_not_counted_among_those_to_keep(folder: RunFolder, ledger: Ledger) -> None:
    old = resume_run(ledger, lambda _: True, lambda _: True)
    new = resume_run(ledger, lambda _: True, lambda _: True)
    late = write(folder, ledger, old.incarnation, 9, -1.0)
    saver = CheckpointSaver(folder, ledger, new.incarnation, keep=1)
    for step in (4, 5):
        save(saver, step, torch.zeros(2))
    saver.wait()
    assert folder.checkpoint_folders() == [folder.checkpoint(5, new.incarnation), folder.path / late.path]
