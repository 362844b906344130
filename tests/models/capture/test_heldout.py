"""The file of the held-out texts: read back as written, and not read at all when it is damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.capture.engine import Continued
from models.capture.heldout import read_heldout, write_heldout

TEXTS = [Continued((1, 2), (3,), torch.arange(12.0).reshape(3, 4)), Continued((5,), (6, 7), torch.ones(3, 4))]


def test_texts_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "heldout.safetensors"
    assert read_heldout(file) is None
    write_heldout(file, TEXTS)
    texts = read_heldout(file)
    assert texts is not None
    for text, expected in zip(texts, TEXTS, strict=True):
        assert (text.prompt, text.continuation) == (expected.prompt, expected.continuation)
        assert torch.equal(text.aux, expected.aux)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-10],
        lambda data: bytes(len(data)),
        lambda data: data[:-40] + bytes(40),
    ],
    ids=["empty", "torn", "zeroed", "last tensor zeroed"],
)
def test_a_damaged_file_counts_as_missing(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "heldout.safetensors"
    write_heldout(file, TEXTS)
    file.write_bytes(damage(file.read_bytes()))
    assert read_heldout(file) is None
