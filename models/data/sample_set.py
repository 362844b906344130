"""A tokenized sample set on disk.

A folder contains `train.safetensors`, `heldout.safetensors` and `samples.json`, which is written last and contains the
hashes of both. A file contains `tokens` int32 and `loss_mask` uint8 of all samples, concatenated, `offsets` int64
`[N + 1]` and `ids` uint8 `[N, 16]` (content hashes), and of its images `images` uint8 `[M, 32]` (hashes, which are the
names of the files in the folder `images`) and `image_offsets` int64 `[N + 1]`. `prompts` int64 `[N]` has the number of
a prompt's tokens where the target answers while it is captured, and 0 elsewhere; such a sample's other tokens only keep
place for the answer, which the ledger holds once it is there. -1: a place for a request of a server's user, and its
answer.
"""

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from infra.files.atomic import sha256_file, write_atomically
from infra.records.data_path import Record, SamplesRecord
from infra.refusal import Refusal
from models.data.encoded import EncodedSample
from models.data.images import FOLDER
from models.data.samples import Splits

Split = Literal["train", "heldout"]
DTYPES = {"int64": "I64", "int32": "I32", "uint8": "U8"}
"""Names of data types in safetensors files."""


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
        _write(path, samples)
        hashes[f"{split}_sha256"] = sha256_file(path)
    write_atomically(folder / "samples.json", SampleSetManifest(samples=record, **hashes))


def _write(path: Path, samples: Sequence[EncodedSample]) -> None:
    """Write a safetensors file. The library's own function wants all tensors in memory, twice."""
    columns = _columns(samples)
    count = int(columns["offsets"][-1])
    # Wide numbers first: each begins at a multiple of its size.
    shapes = {name: (column.dtype, column.shape) for name, column in columns.items()}
    shapes |= {"tokens": (np.dtype(np.int32), (count,)), "loss_mask": (np.dtype(np.uint8), (count,))}
    header, end = dict[str, dict[str, Any]](), 0
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPES[dtype.name], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            if name in columns:
                file.write(columns[name].tobytes())
            for sample in samples if name in ("tokens", "loss_mask") else ():
                file.write(getattr(sample, name).tobytes())


def _columns(samples: Sequence[EncodedSample]) -> dict[str, NDArray[Any]]:
    """All but tokens and masks."""
    offsets, shown, prompts, ids, names = array("q", [0]), array("q", [0]), array("q"), bytearray(), bytearray()
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.tokens))
        shown.append(shown[-1] + len(sample.images))
        prompts.append(sample.prompt)
        ids += bytes.fromhex(sample.id)
        names += bytes.fromhex("".join(sample.images))
    numbers = {"offsets": offsets, "image_offsets": shown, "prompts": prompts}
    return {name: np.array(values, dtype=np.int64) for name, values in numbers.items()} | {
        "ids": np.frombuffer(bytes(ids), dtype=np.uint8).reshape(-1, 16),
        "images": np.frombuffer(bytes(names), dtype=np.uint8).reshape(-1, 32),
    }
