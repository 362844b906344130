"""What clean-up keeps in MLflow because of the run folders that are here."""

from pathlib import Path

import pytest

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.tracking.runs import TrackedRun
from tasks.retention import resumable_runs


def test_unfinished_runs_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path))
    assert resumable_runs() == set()
    for name in ("finished", "unfinished", "damaged", "untracked"):
        folder = RunFolder(tmp_path / name)
        write_atomically(folder.config, "{}")
        if name != "untracked":
            write_atomically(folder.tracking, TrackedRun(uri="http://mlflow", experiment_id="1", run_id=name))
    write_atomically(RunFolder(tmp_path / "finished").report, "{}")
    RunFolder(tmp_path / "damaged").tracking.write_text("{")
    assert resumable_runs() == {"unfinished"}
