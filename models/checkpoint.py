"""Checkpoints: written aside, hashed, renamed, and only then committed in the ledger.

A checkpoint's folder carries the trainer's incarnation in its name, so that a trainer whose run was taken over can
never replace what its successor has written.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.files.atomic import sha256_file, sync_file, sync_folder, write_atomically
from infra.files.lines import read_objects, write_objects
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.ledger.planning import pack_ordinals
from infra.records.data_path import CheckpointRecord, Record

WEIGHTS, AVERAGED, STATE, DRAFT, MANIFEST = (
    "draft.safetensors",
    "averaged.safetensors",
    "state.pt",
    "draft.json",
    "manifest.json",
)
VOCABULARY = "target_ids"
"""Tensor of the weight files: target ids of the draft vocabulary."""


class Manifest(Record):
    """Names everything a checkpoint consists of; a lost ledger is rebuilt from it."""

    run: str
    incarnation: int
    step: int
    epoch: int
    consumed: str
    """Bitmap of the epoch's consumed ordinals (infra.ledger.planning.pack_ordinals)."""
    sha256: dict[str, str]


class DraftDescription(Record):
    """`draft.json` of a checkpoint: what a draft is rebuilt from, besides its weights."""

    config: dict[str, Any]
    aux_layer_ids: tuple[int, ...]
    target_path: str
    target_revision: str
    target_vocab_size: int


@dataclass(frozen=True)
class TrainerState:
    """Everything besides the draft's weights that training resumes from."""

    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    counters: dict[str, float]


def write_checkpoint(
    folder: RunFolder,
    ledger: Ledger,
    *,
    incarnation: int,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    state: TrainerState,
    description: DraftDescription,
) -> CheckpointRecord:
    """Write the checkpoint of `step` durably; the caller commits the returned record.

    `tensors` maps file names (`draft.safetensors`, `averaged.safetensors`) to their contents.
    """
    final = folder.checkpoint(step, incarnation)
    aside = final.with_name(f".{final.name}.tmp")
    aside.mkdir(parents=True)
    for name, content in tensors.items():
        save_file({key: value.detach().cpu().contiguous() for key, value in content.items()}, aside / name)
    torch.save({"optimizer": state.optimizer, "scheduler": state.scheduler, "counters": state.counters}, aside / STATE)
    write_atomically(aside / DRAFT, description)
    for file in aside.iterdir():
        sync_file(file)
    epoch, ordinals = ledger.consumed_ordinals(step)
    manifest = Manifest(
        run=folder.name,
        incarnation=incarnation,
        step=step,
        epoch=epoch,
        consumed=pack_ordinals(ordinals),
        sha256={file.name: sha256_file(file) for file in sorted(aside.iterdir())},
    )
    write_atomically(aside / MANIFEST, manifest)
    aside.rename(final)
    sync_folder(folder.checkpoints)
    return CheckpointRecord(
        step=step,
        path=str(final.relative_to(folder.path)),
        manifest_hash=sha256_file(final / MANIFEST),
        incarnation=incarnation,
    )


def each_tensor(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Nested dicts, lists and tuples with every tensor changed, in order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: each_tensor(change, content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(each_tensor(change, content) for content in value)
    return value


def is_whole(folder: RunFolder, record: CheckpointRecord) -> bool:
    """Whether the checkpoint's manifest and every file it names are there and unchanged."""
    path = folder.path / record.path
    if not (path / MANIFEST).is_file() or sha256_file(path / MANIFEST) != record.manifest_hash:
        return False
    manifest = Manifest.read(path / MANIFEST)
    return all((path / n).is_file() and sha256_file(path / n) == digest for n, digest in manifest.sha256.items())


def record_of(folder: RunFolder, path: Path) -> CheckpointRecord | None:
    """The record of a checkpoint folder, recreated from its manifest; None if the checkpoint is not whole."""
    if not (path / MANIFEST).is_file():
        return None
    manifest = Manifest.read(path / MANIFEST)
    record = CheckpointRecord(
        step=manifest.step,
        path=str(path.relative_to(folder.path)),
        manifest_hash=sha256_file(path / MANIFEST),
        incarnation=manifest.incarnation,
    )
    return record if is_whole(folder, record) else None


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """One of a checkpoint's tensor files."""
    return load_file(path / name)


def read_state(path: Path) -> TrainerState:
    """Optimizer, schedule and counters; nothing is unpickled but tensors and plain values."""
    return TrainerState(**torch.load(path / STATE, weights_only=True, map_location="cpu"))


def remove_uncommitted(folder: RunFolder, ledger: Ledger) -> None:
    """Delete checkpoint folders without a row in the ledger."""
    committed = {Path(record.path).name for record in ledger.checkpoints()}
    for path in folder.checkpoints.glob("*") if folder.checkpoints.is_dir() else []:
        if path.name not in committed:
            shutil.rmtree(path)


def remove_older(folder: RunFolder, ledger: Ledger, keep: int) -> None:
    """Keep the folders of the newest `keep` committed checkpoints.

    Only committed ones are removed: one without a row may be a successor's that is about to be committed.
    """
    for record in ledger.checkpoints()[:-keep]:
        path = folder.path / record.path
        if path.is_dir():
            shutil.rmtree(path)


def rewind_metrics(folder: RunFolder, step: int) -> None:
    """Drop the metrics of steps after `step`, which are trained again, and a torn end of the file."""
    if folder.metrics.is_file():
        write_objects(folder.metrics, (line for line in read_objects(folder.metrics) if line["step"] <= step))
