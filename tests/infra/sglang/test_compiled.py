"""Libraries that a killed compiler left half-written are removed, and nothing else."""

import shutil
from pathlib import Path

import pytest
import torch

from infra.sglang.compiled import WRITTEN_S, remove_broken


@pytest.fixture
def library(tmp_path: Path) -> Path:
    made = tmp_path / "ab" / "kernel.so"
    made.parent.mkdir()
    shutil.copyfile(torch._C.__file__, made)
    return made


@pytest.mark.parametrize("kept", [0, 10, 64, 2000])
def test_an_incomplete_library_goes_once_nobody_writes_it(library: Path, kept: int):
    other, note = library.with_name("other.so"), library.with_name("note.txt")
    other.write_bytes(library.read_bytes())
    note.write_text("no library")
    content = library.read_bytes()
    library.write_bytes(content[:kept])
    written = library.stat().st_mtime
    assert remove_broken(library.parents[1], written + WRITTEN_S / 2) == [], "it may still be linked"
    assert remove_broken(library.parents[1], written + 2 * WRITTEN_S) == [library]
    assert not library.exists()
    assert other.read_bytes() == content
    assert note.exists()
    assert remove_broken(library.parents[1], written + 2 * WRITTEN_S) == []


def test_a_missing_cache_is_fine(tmp_path: Path):
    assert remove_broken(tmp_path / "none") == []
