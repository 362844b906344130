"""Records that earlier versions wrote."""

import json
from pathlib import Path

import pytest

from infra.records.data_path import TrainingResult
from infra.records.goodput import CostFit
from infra.refusal import Refusal

EARLIER = {
    "constant": 1.0, "per_text": 0.0, "per_token": 0.5, "knee": 0.0, "per_token_beyond": 0.0, "several": 0.0,
    "several_per_text": 0.0, "together": 0.0, "per_position": 0.0, "worst_error": 0.1,
}  # fmt: skip


def test_what_a_deleted_field_held_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(EARLIER))
    assert CostFit.read(path).seconds(2, 3) == 1.0 + 0.5 * 6


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(EARLIER | {"of_a_later_version": 1.0}))
    with pytest.raises(Refusal, match=r"costs\.json is damaged, or of another version of Draftsmith"):
        CostFit.read(path)


def test_a_missing_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    path.write_text('{"steps": 1, "step_s": 2.0}')
    with pytest.raises(Refusal, match=r"training\.json is damaged, or of another version of Draftsmith"):
        TrainingResult.read(path)
