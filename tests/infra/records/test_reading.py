"""Records of other versions."""

from pathlib import Path

import pytest

from infra.records.data_path import Record
from infra.refusal import Refusal


class Part(Record):
    size: int


class Kept(Record):
    key: str
    parts: tuple[Part, ...]


def test_what_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text('{"key": "a", "gone": 1, "parts": [{"size": 2, "gone": 3}]}')
    assert Kept.read(path) == Kept(key="a", parts=(Part(size=2),))


def test_a_record_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text('{"gone": 1, "parts": []}')
    with pytest.raises(Refusal, match=r"kept\.json is damaged, or of another version of Draftsmith \(Field required\)"):
        Kept.read(path)
