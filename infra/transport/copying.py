"""Copies bytes and computes their checksums on the way, while they are in the processor's cache."""

import xxhash

CHUNK = 256 * 2**10
"""Bytes copied, then hashed: they fit into the second-level cache."""

BLOCK = 4 * 2**20
"""Bytes per checksum. A reader of a part of a buffer reads and verifies whole blocks."""

SUM = 32
"""Digits of a checksum."""


class BlockSums:
    """The checksums of a buffer's blocks, whose bytes come in any portions."""

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._open = xxhash.xxh3_128()
        self._left = BLOCK

    def update(self, view: memoryview) -> None:
        while view.nbytes:
            part = view[: self._left]
            self._open.update(part)
            self._left -= part.nbytes
            if not self._left:
                self._close()
            view = view[part.nbytes :]

    def _close(self) -> None:
        self._closed.append(self._open.hexdigest())
        self._open.reset()
        self._left = BLOCK

    def hexdigest(self) -> str:
        """Concatenated checksums; for an empty buffer the checksum of no bytes."""
        if self._left < BLOCK or not self._closed:
            self._close()
        return "".join(self._closed)


def block_sums(view: memoryview) -> str:
    """Checksums of a buffer's blocks, in order."""
    sums = BlockSums()
    sums.update(view)
    return sums.hexdigest()


def copy_hashed(into: memoryview, source: memoryview, sums: BlockSums) -> None:
    """Copy `source` to `into`, of the same size, and add what arrived to the checksums."""
    for at in range(0, source.nbytes, CHUNK):
        arrived = into[at : at + CHUNK]
        arrived[:] = source[at : at + CHUNK]
        sums.update(arrived)
