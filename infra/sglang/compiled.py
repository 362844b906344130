"""Torch's cache of compiled kernels, which SGLang's servers share: what a killed compiler left half-written is removed.

A server that is killed while a CPU kernel is linked leaves a library that ends too early. Every later server of the
same user would load it and fail ("file too short"). What is not there torch (2.13) compiles again.
"""

import struct
import time
from collections.abc import Iterator
from pathlib import Path

WRITTEN_S = 60.0
"""A library that nobody has written to for so long is not being linked any more."""
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
"""Of a 64-bit ELF file; its sections' table, at `e_shoff`, is at the end of the file."""


def remove_broken(folder: Path, now: float | None = None) -> list[Path]:
    """Remove libraries under `folder` that are incomplete and not being written; which they were."""
    now = time.time() if now is None else now
    found = []
    for file in _libraries(folder):
        try:
            if now - file.stat().st_mtime > WRITTEN_S and not _complete(file):
                file.unlink()
                found.append(file)
        except FileNotFoundError:
            continue  # another start was faster
    return found


def _libraries(folder: Path) -> Iterator[Path]:
    return folder.rglob("*.so") if folder.is_dir() else iter(())


def _complete(file: Path) -> bool:
    with file.open("rb") as opened:
        head = opened.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(b"\x7fELF"):
        return False
    *_, sections, _, _, _, _, size, count, _ = HEADER.unpack(head)
    return file.stat().st_size >= sections + size * count
