"""Files of tensors get the mode that other files of a run have."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import models
from models.capture.engine import Continued
from models.capture.heldout import write_heldout
from models.tensor_file import write_tensors

TENSORS = {"weight": torch.arange(4.0)}


@pytest.fixture(params=[0o022, 0o007], ids=["022", "007"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


@pytest.mark.parametrize(
    "write",
    [
        lambda file: write_tensors(file, TENSORS),
        lambda file: write_heldout(file, [Continued((1,), (2,), torch.ones(2, 4))]),
    ],
    ids=["tensors", "held-out texts"],
)
def test_the_umask_decides_who_may_read_a_file(tmp_path: Path, umask: int, write: Callable[[Path], None]) -> None:
    write(tmp_path / "file.safetensors")
    assert mode(tmp_path / "file.safetensors") == 0o666 & ~umask


def test_checkpoints_and_exports_are_written_by_the_same_function() -> None:
    files = [path for folder in models.__path__ for path in Path(folder).rglob("*.py")]
    assert [path.name for path in files if "save_file(" in path.read_text()] == ["tensor_file.py"]


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    write_tensors(file, TENSORS)
    file.chmod(0o640)
    write_tensors(file, {"weight": torch.ones(4)}, {"format": "pt"})
    assert mode(file) == 0o640
    assert torch.equal(load_file(file)["weight"], torch.ones(4))
