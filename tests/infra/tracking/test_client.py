"""A client leaves nothing behind that the next run would take for the operator's wish."""

from pathlib import Path

import mlflow
import pytest

from infra.settings import tracking_uri
from infra.tracking.client import connect


@pytest.mark.parametrize("given", [None, "http://127.0.0.1:9"])
def test_the_address_of_one_run_is_not_that_of_the_next(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    if given is None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    before, own = tracking_uri(), f"sqlite:///{tmp_path / 'own.db'}"
    connect(own)
    assert mlflow.get_tracking_uri() == own
    assert tracking_uri() == before
