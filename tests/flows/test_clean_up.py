"""The clean-up flow: a step that fails keeps no other from being done."""

import os
import time
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from flows.clean_up import clean_up


@pytest.mark.slow
def test_prompts_go_even_where_mlflow_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runs", "cache", "shm"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"DRAFTSMITH_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (tmp_path / "mlflow.db").write_text("no database")
    prompts, unused = tmp_path / "runs/drift/draft-x/prompts-1.jsonl", tmp_path / "cache/samples/old"
    unused.mkdir(parents=True)
    prompts.parent.mkdir(parents=True)
    prompts.write_text("{}")
    old = time.time() - 61 * 86_400
    for path in (prompts, unused):
        os.utime(path, (old, old))
    with prefect_test_harness(server_startup_timeout=120), pytest.raises(ExceptionGroup, match="damaged") as failed:
        clean_up()
    assert len(failed.value.exceptions) == 3, "data sets, runs and trash"
    assert not prompts.exists()
    assert not unused.exists()
