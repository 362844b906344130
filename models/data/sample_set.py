"""A tokenized sample set on disk.

A folder contains `train.safetensors`, `heldout.safetensors` and `samples.json`, which is written last and contains the
hashes of both. A file contains `tokens` int32 and `loss_mask` uint8 of all samples, concatenated, `offsets` int64
`[N + 1]` and `ids` uint8 `[N, 16]` (content hashes), and of its images `images` uint8 `[M, 32]` (hashes, which are the
names of the files in the folder `images`) and `image_offsets` int64 `[N + 1]`. `prompts` int64 `[N]` has the number of
a prompt's tokens where the target answers while it is captured, and 0 elsewhere; such a sample's other tokens only keep
place for the answer, which the ledger holds once it is there. -1: a place for a request of a server's user, and its
answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.files.atomic import sha256_file, write_atomically
from infra.records.data_path import Record, SamplesRecord
from infra.refusal import Refusal
from models.data.images import FOLDER
from models.data.samples import EncodedSample, Splits

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Sample:
    """One sample: `tokens` `[T]` int64, `loss_mask` `[T]` bool (True: an assistant token)."""

    tokens: Tensor
    loss_mask: Tensor
    id: str
    images: tuple[Path, ...] = ()
    """Files of the images that stand in it, in order."""


class SampleSetManifest(Record):
    """`samples.json` of a sample set."""

    samples: SamplesRecord
    train_sha256: str
    heldout_sha256: str


@dataclass(frozen=True)
class SampleSet:
    """Training or held-out samples; the tensors are memory-mapped."""

    tokens: Tensor
    loss_mask: Tensor
    offsets: Tensor
    ids: Tensor
    images: Tensor
    image_offsets: Tensor
    prompts: Tensor
    folder: Path

    @classmethod
    def open(cls, folder: Path, split: Split) -> "SampleSet":
        """Open a split. Raises Refusal if it is incomplete or its hash does not match."""
        manifest = read_manifest(folder)
        path = folder / f"{split}.safetensors"
        expected = manifest.train_sha256 if split == "train" else manifest.heldout_sha256
        if not path.is_file() or sha256_file(path) != expected:
            raise Refusal(f"{path} is missing or was changed: delete {folder} and prepare the samples again")
        return cls(**load_file(path), folder=folder / FOLDER)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        start, end = self.offsets[index].item(), self.offsets[index + 1].item()
        first, last = self.image_offsets[index : index + 2].tolist()
        return Sample(
            tokens=self.tokens[start:end].long(),
            loss_mask=self.loss_mask[start:end].bool(),
            id=bytes(self.ids[index].tolist()).hex(),
            images=tuple(self.folder / bytes(name).hex() for name in self.images[first:last].tolist()),
        )

    def prompt(self, index: int) -> Tensor | None:
        """The tokens `[P]` int64 of a prompt that is answered while it is captured, none of what a user will ask; None
        for any other sample."""
        length = int(self.prompts[index])
        return self[index].tokens[: max(0, length)] if length else None

    def answered(self, index: int, answer: Sequence[int] | None) -> Sample:
        """A sample, with the answer that the ledger keeps for it, if it keeps one.

        Tokens that are not learned are kept as -1 - id, so they are negative.
        """
        sample, prompt = self[index], self.prompt(index)
        if answer is None or prompt is None:
            return sample
        kept = torch.cat([-1 - prompt, torch.tensor(answer, dtype=torch.long)])
        learned = kept >= 0
        return replace(sample, tokens=torch.where(learned, kept, -1 - kept), loss_mask=learned)

    @property
    def supervised(self) -> Tensor:
        """`[S]` int64: all supervised tokens that are known."""
        known = (self.prompts == 0).repeat_interleave(self.lengths)
        return self.tokens[self.loss_mask.bool() & known].long()

    def canaries(self, tokens: int) -> list[Sample]:
        """What shows whether an engine captures rightly: the first `tokens` of the first sample, which are text, and
        the first sample with images, whole."""
        # Places for answers hold no text.
        first = self[int((self.prompts == 0).int().argmax())]
        shown = self.image_offsets.diff().nonzero().flatten().tolist()[:1]
        start = replace(first, tokens=first.tokens[:tokens], loss_mask=first.loss_mask[:tokens])
        return [start] * (not first.images) + [self[index] for index in shown]

    @property
    def lengths(self) -> Tensor:
        """`[N]` int64 token counts of the samples."""
        return self.offsets.diff()


def read_manifest(folder: Path) -> SampleSetManifest:
    """The manifest of a sample set, with the folder's present path."""
    path = folder / "samples.json"
    if not path.is_file():
        raise Refusal(f"{folder} is not a sample set (no samples.json): prepare the samples again")
    manifest: SampleSetManifest = SampleSetManifest.read(path)
    return manifest.model_copy(update={"samples": manifest.samples.model_copy(update={"path": str(folder)})})


def write_sample_set(folder: Path, splits: Splits, record: SamplesRecord) -> None:
    """Write both splits into `folder`, then the manifest with their hashes."""
    hashes = {}
    for split, samples in (("train", splits.train), ("heldout", splits.heldout)):
        path = folder / f"{split}.safetensors"
        save_file(_tensors(samples), path)
        hashes[f"{split}_sha256"] = sha256_file(path)
    write_atomically(folder / "samples.json", SampleSetManifest(samples=record, **hashes))


def _tensors(samples: Sequence[EncodedSample]) -> dict[str, Tensor]:
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    ids = np.frombuffer(bytes.fromhex("".join(sample.id for sample in samples)), dtype=np.uint8)
    shown = [len(sample.images) for sample in samples]
    names = np.frombuffer(bytes.fromhex("".join(name for sample in samples for name in sample.images)), dtype=np.uint8)
    return {
        "tokens": torch.from_numpy(np.concatenate([sample.tokens for sample in samples])),
        "loss_mask": torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples]).astype(np.uint8)),
        "offsets": torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)),
        "ids": torch.from_numpy(ids.reshape(-1, 16).copy()),
        "images": torch.from_numpy(names.reshape(-1, 32).copy()),
        "image_offsets": torch.from_numpy(np.concatenate([[0], np.cumsum(shown)]).astype(np.int64)),
        "prompts": torch.tensor([sample.prompt for sample in samples], dtype=torch.int64),
    }
