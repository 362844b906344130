"""Checkpoints: written aside, hashed, renamed, and only then committed in the ledger.

A checkpoint's folder carries the trainer's incarnation in its name, so that a trainer whose run was taken over can
never replace what its successor has written.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from infra.config import left_out
from infra.files.atomic import sha256_file, sync_file, sync_folder, write_atomically
from infra.files.lines import read_objects, write_objects
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.records.data_path import CheckpointRecord, Ranges, Record
from models.tensor_file import write_tensors

WEIGHTS, AVERAGED, STATE = "draft.safetensors", "averaged.safetensors", "state.pt"
DRAFT, MANIFEST = "draft.json", "manifest.json"
VOCABULARY = "target_ids"
"""Tensor of the weight files: target ids of the draft vocabulary."""
SAVE_S = 1800.0
"""Timeout for writing one checkpoint, for disks that hang."""

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors of each weight file, by the file's name."""


class Manifest(Record):
    """Names everything a checkpoint consists of; a lost ledger is rebuilt from it."""

    run: str
    incarnation: int
    step: int
    epoch: int
    consumed: Ranges
    """Ordinals of the epoch that are consumed."""
    sha256: dict[str, str]


class DraftDescription(Record):
    """`draft.json` of a checkpoint: what a draft is rebuilt from, besides its weights."""

    _gone = left_out("target_path", "target_revision")
    config: dict[str, Any]
    aux_layer_ids: tuple[int, ...]
    target_vocab_size: int


class TrainerState(TypedDict):
    """Everything besides the draft's weights that training resumes from."""

    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    counters: dict[str, float]


class CheckpointSaver:
    """Saves beside training: copies at once; a thread writes and commits. A checkpoint exists once it has its row.

    One save at a time, in order; the next one waits for the last, whose error it raises.
    """

    def __init__(self, folder: RunFolder, ledger: Ledger, incarnation: int, keep: int):
        self._folder, self._ledger, self._incarnation, self._keep = folder, ledger, incarnation, keep
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None
        self.saves = 0
        self.stall_s = 0.0
        """Seconds that training stood still for all saves: for the copies, and for saves before them."""

    def save(self, step: int, tensors: Tensors, state: TrainerState, description: DraftDescription) -> None:
        """Begin to save the checkpoint of `step`; what is given may change once this returns."""
        self.wait_in_training()
        started = time.monotonic()
        self._last = self._worker.submit(self._save, step, on_host(tensors), on_host(state), description)
        self.saves += 1
        self.stall_s += time.monotonic() - started

    def wait_in_training(self) -> None:
        """As `wait`, while training stands still."""
        started = time.monotonic()
        self.wait()
        self.stall_s += time.monotonic() - started

    def wait(self) -> None:
        """Wait until no save is running. Raises the last save's error, or TimeoutError if the disk hangs."""
        last, self._last = self._last, None
        if last is not None:
            last.result(timeout=SAVE_S)

    def _save(self, step: int, tensors: Tensors, state: TrainerState, description: DraftDescription) -> None:
        self._ledger.commit(self._incarnation, self.write(step, tensors, state, description))
        # Only committed ones: a folder without a row may be a successor's that is about to be committed.
        for record in self._ledger.checkpoints()[: -self._keep]:
            if (self._folder.path / record.path).is_dir():
                shutil.rmtree(self._folder.path / record.path)

    def write(
        self, step: int, tensors: Tensors, state: TrainerState, description: DraftDescription
    ) -> CheckpointRecord:
        """Write the checkpoint of `step` durably; it is not committed yet."""
        folder, final = self._folder, self._folder.checkpoint(step, self._incarnation)
        aside = final.with_name(f".{final.name}.tmp")
        aside.mkdir(parents=True)
        try:
            for name, content in tensors.items():
                write_tensors(aside / name, {key: x.detach().cpu().contiguous() for key, x in content.items()})
            torch.save(state, aside / STATE)
        except (SafetensorError, RuntimeError) as error:  # neither library keeps the operating system's error
            raise OSError(f"the checkpoint {aside} cannot be written, perhaps its disk is full: {error}") from error
        write_atomically(aside / DRAFT, description)
        for file in aside.iterdir():
            sync_file(file)
        epoch, consumed = self._ledger.consumed_ranges(step)
        manifest = Manifest(
            run=folder.name,
            incarnation=self._incarnation,
            step=step,
            epoch=epoch,
            consumed=consumed,
            sha256={file.name: sha256_file(file) for file in sorted(aside.iterdir())},
        )
        write_atomically(aside / MANIFEST, manifest)
        aside.rename(final)
        sync_folder(folder.checkpoints)
        return _record(folder, final, manifest)


def on_host(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples with every tensor copied to the CPU."""
    # Not `.cpu().clone()`: that is two copies of what comes from a GPU.
    return each_tensor(lambda x: x.detach().to("cpu", copy=True), value)


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


def _record(folder: RunFolder, path: Path, manifest: Manifest) -> CheckpointRecord:
    return CheckpointRecord(
        step=manifest.step,
        path=str(path.relative_to(folder.path)),
        manifest_hash=sha256_file(path / MANIFEST),
        incarnation=manifest.incarnation,
    )


def newest_whole(folder: RunFolder) -> tuple[CheckpointRecord, Manifest] | None:
    """The newest checkpoint folder that is whole, with its record as its manifest gives it."""
    for path in reversed(folder.checkpoint_folders()):
        if (path / MANIFEST).is_file():
            manifest = Manifest.read(path / MANIFEST)
            record = _record(folder, path, manifest)
            if is_whole(folder, record):
                return record, manifest
    return None


class Restored(NamedTuple):
    """What training resumes from besides the draft's weights."""

    averaged: dict[str, Tensor]
    state: TrainerState


def read_restored(path: Path) -> Restored:
    """Nothing is unpickled but tensors and plain values."""
    return Restored(load_file(path / AVERAGED), torch.load(path / STATE, weights_only=True, map_location="cpu"))


def remove_uncommitted(folder: RunFolder, ledger: Ledger) -> None:
    """Delete checkpoint folders without a row in the ledger."""
    committed = {Path(record.path).name for record in ledger.checkpoints()}
    for path in folder.checkpoints.glob("*") if folder.checkpoints.is_dir() else []:
        if path.name not in committed:
            shutil.rmtree(path)


def rewind_metrics(folder: RunFolder, step: int) -> None:
    """Drop the metrics of steps after `step`, which are trained again, and a torn end of the file."""
    if folder.metrics.is_file():
        write_objects(folder.metrics, (line for line in read_objects(folder.metrics) if line["step"] <= step))
