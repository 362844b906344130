"""Old runs go, and no others."""

import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from infra.files.locks import hold
from infra.files.private import keep_private
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.records.data_path import SampleSlot
from infra.refusal import Refusal
from infra.run.ownership import is_owned
from infra.run.retention import is_finished, old_runs, remove, remove_all, remove_rest


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def make(runs: Path, name: str, days: float, *files: str, recipe: str = "tiny", **config: Any) -> RunFolder:
    """A run whose files were last changed `days` days ago."""
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": recipe, **config}))
    for file in files:
        (folder / file).touch()
    then = time.time() - days * 86_400
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))
    return RunFolder(folder)


def names(folders: list[RunFolder]) -> set[str]:
    return {folder.name for folder in folders}


def test_the_newest_finished_runs_of_each_recipe_stay(runs: Path) -> None:
    for day in range(5):
        make(runs, f"a-{day}", day, "report.json", "metrics.jsonl", recipe="a")
    make(runs, "b-9", 9, "report.json", recipe="b")
    assert names(old_runs(runs, 2, 30, 60)) == {"a-2", "a-3", "a-4"}
    assert old_runs(runs, 5, 30, 60) == []


def test_a_damaged_recipe_keeps_no_other_run(runs: Path) -> None:
    make(runs, "old", 31, "metrics.jsonl")
    damaged = make(runs, "damaged", 31, "metrics.jsonl")
    damaged.config.write_bytes(b"")
    for path in (damaged.config, damaged.path):
        os.utime(path, (0, 0))
    assert names(old_runs(runs, 2, 30, 60)) == {"damaged", "old"}
    assert remove(damaged)
    assert not damaged.path.exists()


def test_an_unfinished_run_can_be_gone_on_with_for_a_while(runs: Path) -> None:
    make(runs, "young", 29, "metrics.jsonl", "ledger.sqlite")
    make(runs, "old", 31, "metrics.jsonl", "ledger.sqlite", "benchmark.json")
    (runs / "drift").mkdir()
    assert names(old_runs(runs, 0, 30, 60)) == {"old"}


def test_a_run_that_trains_nothing_is_finished_with_what_it_was_made_for(runs: Path) -> None:
    assert is_finished(make(runs, "promote", 0, "smoke.json"))
    assert is_finished(make(runs, "nightly", 0, "benchmark.json"))
    assert not is_finished(make(runs, "begun", 0, "target.json"))


def test_what_users_wrote_goes_when_the_recipe_says(runs: Path) -> None:
    """Whatever became of the run, and however often it was resumed since."""
    learned = {"generator": {"live": {"retention_days": 7}}}
    for name, days, files in (("old", 8, ("live.jsonl", "report.json")), ("young", 6, ("live.jsonl", "report.json"))):
        make(runs, name, days, *files, **learned).config.touch()
    make(runs, "unfinished", 8, "live.jsonl", "metrics.jsonl", **learned)
    make(runs, "waiting", 8, "target.json", **learned)
    make(runs, "other", 8, "report.json", generator={"live": None})
    assert names(old_runs(runs, 5, 30, 60)) == {"old", "unfinished"}


def test_a_run_on_old_prompts_of_users_goes_with_them(runs: Path) -> None:
    for name, days in (("old", 61), ("young", 59)):
        keep_private(make(runs, name, 0, "report.json").path, time.time() - days * 86_400)
    assert names(old_runs(runs, 5, 30, 60)) == {"old"}


def test_what_somebody_runs_stays_and_an_interrupted_removal_is_finished(runs: Path) -> None:
    folder = make(runs, "run", 99, "report.json")
    with hold(folder.run_lock):
        assert not remove(folder)
    assert folder.report.exists()
    assert remove(folder)
    assert list(runs.iterdir()) == []
    (runs / ".removed-other").mkdir()
    remove_rest(runs)
    assert list(runs.iterdir()) == []


def test_a_run_of_somebody_else_stops_no_clean_up_and_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(runs, "mine", 31, "metrics.jsonl")
    theirs = make(runs, "theirs", 31, "metrics.jsonl")
    theirs.logs.mkdir()
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != theirs.logs)
    assert names(old_runs(runs, 0, 30, 60)) == {"mine"}
    theirs.path.rename(runs / ".removed-theirs")
    monkeypatch.setattr("os.access", lambda path, _mode: "theirs" not in str(path))
    remove_rest(runs)
    assert (runs / ".removed-theirs").is_dir()
    named = capsys.readouterr().out
    assert f"{theirs.path} belongs to user {os.getuid()} and cannot be removed: it stays" in named


def test_a_run_whose_lock_is_somebody_else_s_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("infra.run.ownership.hold", refuse)
    with pytest.raises(Refusal, match=r"run theirs belongs to user \d+, and .*run.lock cannot be opened"):
        is_owned(make(runs, "theirs", 0, "run.lock"))


def test_the_rows_of_a_removed_run_leave_a_shared_ledger(runs: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    for name in ("gone", "stays"):
        folder = make(runs, name, 0, "report.json")
        folder.config.write_text(json.dumps({"name": "tiny", "ledger": {"url": url}}))
        with Ledger.open(url, name) as ledger:
            ledger.create_run(budget_bytes=100, bytes_per_token=1, lease_seconds=60, max_attempts=2, order="any")
            ledger.open_epoch(None, 0, [SampleSlot(ordinal=i, sample=i, tokens=1) for i in range(3)])
    assert remove(RunFolder(runs / "gone"))
    with sqlite3.connect(tmp_path / "shared.sqlite") as database:
        assert database.execute("select run, count(*) from samples group by run").fetchall() == [("stays", 3)]
        assert database.execute("select name from runs").fetchall() == [("stays",)]
    with Ledger.open(url, "gone") as ledger:
        assert ledger.delete_run() == 0


def test_a_shared_ledger_of_another_version_stops_the_removal_of_its_own_runs_alone(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("create table samples (run text, rank integer)")
    first = make(runs, "first", 9, "report.json", ledger={"url": f"sqlite:///{other}"})
    second = make(runs, "second", 9, "report.json")
    gone, errors = remove_all([first, second])
    assert gone == ["second"]
    assert [path.name for path in runs.iterdir()] == ["first"]
    (error,) = errors
    assert "run first stays" in error
    assert "made by another version of Draftsmith" in error
    assert remove_all([first]) == ([], [])  # told once: it will not change by itself
    assert names(old_runs(runs, 0, 5, 60)) == {"first"}, "and it is as old as before"
