"""Resumed benchmarks: rows keep under what they were measured, and a failure is not hidden by a later attempt."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from infra.refusal import Refusal

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("attempts")


def with_earlier(path: Path, row: dict[str, object], settings: dict[str, object]) -> None:
    """A line that another commit wrote."""
    earlier = {"commit": "a" * 40, "date": "2026-01-01", "hardware": "8 CPU cores", "cpu": "another"}
    path.write_text(json.dumps(row | earlier | {"settings": settings}) + "\n")


def test_a_row_keeps_its_commit_and_processor(attempts: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with_earlier(path, {"seed": 0, "length": 1.5}, {"servers": 3})
    known = attempts.Attempts(path, {"servers": 3})
    known.keep({"seed": 1, "length": 2.0})
    rows = attempts.Attempts(path, {"servers": 3}).newest
    assert [row["seed"] for row in rows] == [0, 1]
    assert rows[0]["commit"] == "a" * 40
    assert rows[0]["cpu"] == "another"
    assert rows[1]["commit"] != "a" * 40
    assert known.under()["commit"] == rows[1]["commit"]


def test_rows_of_other_settings_are_refused(attempts: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with_earlier(path, {"seed": 0}, {"servers": 2})
    with pytest.raises(Refusal, match="other settings"):
        attempts.Attempts(path, {"servers": 3})


def test_a_failed_attempt_stays_when_its_seed_ran_again(attempts: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with_earlier(path, {"seed": 4, "whole": False, "lost": ["a request"]}, {})
    known = attempts.Attempts(path, {})
    known.keep({"seed": 4, "whole": True, "lost": []})
    assert [row["whole"] for row in known.newest] == [True]
    (failed,) = known.replaced
    assert (failed["seed"], failed["lost"], failed["commit"]) == (4, ["a request"], "a" * 40)


def test_chaos_keeps_a_failure_when_only_its_result_is_left(attempts: ModuleType, tmp_path: Path) -> None:
    chaos = importlib.import_module("chaos")
    known = {
        "seed": 7,
        "ground": "arena",
        "samples": 1,
        "ranks": 1,
        "generators": 1,
        "checkpoint_steps": 1,
        "lease_s": 1.0,
    }
    outcomes = [chaos.Outcome(**known, commit="a", faults=["lost"]), chaos.Outcome(**known, commit="b")]
    result, part = tmp_path / "chaos.json", tmp_path / "chaos.jsonl"
    result.write_text(json.dumps(chaos.summary(outcomes, "0:8")))
    chaos.start_from_result(result, part)
    again = chaos.summary(chaos.outcomes_in(part), "0:8")
    assert [(one["seed"], one["commit"]) for one in again["failed_before_a_later_commit"]] == [(7, "a")]
    assert again["failed"] == []


def test_comparisons_of_another_commit_keep_theirs(attempts: ModuleType) -> None:
    old = {"commit": "a", "date": "2026-01-01", "hardware": "h", "comparisons": {"tiny": {"best": 1}}}
    assert attempts.kept_parts(old, "comparisons") == {
        "tiny": {"commit": "a", "date": "2026-01-01", "hardware": "h", "best": 1}
    }
