"""Encoded samples that wait on disk: of each only a few numbers stay in memory, however many there are."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, overload

import numpy as np
from numpy.typing import NDArray

from models.data.encoded import EncodedSample

DOCUMENT = 32
"""Characters of a document's name that are kept: half of the hexadecimal digits of its hash."""
Numbers = NDArray[np.int64]


class Spool(Sequence[EncodedSample]):
    """Samples in the order in which they came; they are read back one at a time."""

    def __init__(self, folder: Path | None):
        """`folder` is where the file lies that nobody sees; default: the system's for temporary files."""
        self._file: IO[bytes] = TemporaryFile(dir=folder, prefix="samples-")  # noqa: SIM115 (lives as long as this)
        self._starts, self._lengths, self._prompts, self._turns = array("q", [0]), array("q"), array("q"), array("q")
        self._documents, self._ids, self._thinking = bytearray(), bytearray(), bytearray()
        self._images: dict[int, tuple[str, ...]] = {}

    def add(self, sample: EncodedSample) -> None:
        document = sample.document[:DOCUMENT].encode("ascii")
        self._file.write(sample.tokens.tobytes() + sample.loss_mask.tobytes())
        if sample.images:
            self._images[len(self)] = sample.images
        self._lengths.append(len(sample.tokens))
        self._starts.append(self._starts[-1] + len(sample.tokens) * (sample.tokens.itemsize + 1))
        self._prompts.append(sample.prompt)
        self._turns.append(sample.turns)
        self._thinking.append(sample.thinking)
        self._documents += document.ljust(DOCUMENT, b"\0")
        self._ids += bytes.fromhex(sample.id)

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> EncodedSample: ...
    @overload
    def __getitem__(self, index: slice) -> "Chosen": ...
    def __getitem__(self, index: int | slice) -> "EncodedSample | Chosen":
        if isinstance(index, slice):
            return Chosen(self, np.arange(len(self))[index])
        start, length = self._starts[index], self._lengths[index]
        self._file.seek(start)
        content = self._file.read(self._starts[index + 1] - start)
        split = len(content) - length
        return EncodedSample(
            np.frombuffer(content[:split], dtype=np.int32),
            np.frombuffer(content[split:], dtype=np.bool_),
            bytes(self._documents[index * DOCUMENT : (index + 1) * DOCUMENT]).rstrip(b"\0").decode("ascii"),
            turns=self._turns[index],
            thinking=bool(self._thinking[index]),
            images=self._images.get(index, ()),
            prompt=self._prompts[index],
        )

    @property
    def documents(self) -> NDArray[np.bytes_]:
        """`[N]` names, which are ordered as their texts are."""
        return np.frombuffer(self._documents, dtype=f"S{DOCUMENT}")

    @property
    def prompts(self) -> Numbers:
        """`[N]`, see EncodedSample."""
        return np.frombuffer(self._prompts, dtype=np.int64)

    def by_content(self) -> tuple[Numbers, Numbers]:
        """The samples `[N]` by content hash, then by arrival, and of each of these the number of its content."""
        high, low = np.frombuffer(self._ids, dtype=">u8").reshape(-1, 2).T
        order = np.lexsort((low, high))
        new = np.ones(len(self), dtype=bool)
        new[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
        return order, np.cumsum(new) - 1


class Chosen(Sequence[EncodedSample]):
    """Some samples of a spool, in an order of their own."""

    def __init__(self, spool: Spool, indices: Numbers):
        self._spool, self._indices = spool, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> EncodedSample: ...
    @overload
    def __getitem__(self, index: slice) -> "Chosen": ...
    def __getitem__(self, index: int | slice) -> "EncodedSample | Chosen":
        chosen = self._indices[index]
        return Chosen(self._spool, chosen) if isinstance(index, slice) else self._spool[int(chosen)]
