"""The early warning: when held-out acceptance falls while training's own rises, and only then."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.records.data_path import HELDOUT_LENGTH
from models.training.heldout import FALL, LossPoint, look_of, overfitting_warning, read_history


def history(*measured: tuple[float, float]) -> list[LossPoint]:
    """One line per measurement: (training, held-out)."""
    return [LossPoint(100 * place, training, heldout) for place, (training, heldout) in enumerate(measured, start=1)]


RISEN = [(1.5, 1.50), (1.8, 1.70)]


@pytest.mark.parametrize(
    "after",
    [
        [(2.0, 1.60)],
        [(2.0, 1.60), (2.2, 1.69)],
        [(1.7, 1.60), (2.2, 1.50)],
        [(2.0, 1.69), (2.2, 1.68)],
        [(1.6, 1.40), (1.5, 1.30)],
    ],
    ids=["once only", "recovered", "training fell with it", "within the margin", "both fall"],
)
def test_nothing_is_said_without_reason(after):
    assert overfitting_warning(history(*RISEN, *after)) is None


def test_the_warning_names_both_lengths_and_what_to_do():
    said = overfitting_warning(history(*RISEN, (2.0, 1.60), (2.2, 1.50)))
    assert said is not None
    assert "has fallen from 1.70 at step 200 to 1.50 at step 400" in said
    assert "rose from 1.80 to 2.20" in said
    assert "more text or fewer epochs" in said


def test_trainings_length_is_the_mean_since_the_measurement_before():
    lines = [
        LossPoint(1, 9.0, 1.7),
        LossPoint(2, 1.0, None),
        LossPoint(3, 3.0, 1.8),
        LossPoint(4, 2.1, 1.5),
        LossPoint(5, 1.0, None),
    ]
    assert overfitting_warning([*lines, LossPoint(6, 3.3, 1.5)]) is not None
    assert overfitting_warning([*lines, LossPoint(6, 2.9, 1.5)]) is None


@given(st.lists(st.tuples(st.floats(1, 8), st.floats(1, 8)), max_size=8))
def test_a_warning_is_never_of_a_held_out_length_near_the_best(measured):
    said = overfitting_warning(history(*measured))
    if said is not None:
        best = max(heldout for _, heldout in measured)
        assert all(heldout < best * (1 - FALL) for _, heldout in measured[-2:])


def test_lines_are_read_back(tmp_path):
    rows = [{"step": 3, "acceptance_by_position": [0.5, 0.5]}]
    rows.append({"step": 6, "acceptance_by_position": [], HELDOUT_LENGTH: 1.25})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_history(tmp_path / "metrics.jsonl") == [LossPoint(3, 1.75, None), LossPoint(6, 1.0, 1.25)]
    assert read_history(tmp_path / "none") == []
    assert look_of(rows[0]).training == 1.75
