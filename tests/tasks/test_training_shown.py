"""What others see of a training must not hold it up."""

import json
import socket

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.tracking.runs import TrackedRun
from tasks import training_shown
from tasks.run import OpenRun
from tasks.training_shown import ShownTraining


def test_a_server_that_hangs_holds_up_nobody(
    run: OpenRun, tracking: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_shown, "EVERY_S", 0.0)
    monkeypatch.setattr(training_shown, "LAST_S", 120.0)
    run.folder.metrics.write_text(json.dumps({"step": 3, "total_steps": 9, "time": 1.0, "loss": 2.0}) + "\n")
    assert tracking.logged_step < 3
    hangs = socket.create_server(("127.0.0.1", 0))  # it takes the request, and never answers
    hangs.settimeout(60)
    address = f"http://127.0.0.1:{hangs.getsockname()[1]}/api"
    with temporary_settings({PREFECT_API_URL: address}), ShownTraining(run) as shown:
        shown.catch_up()
        connection, _ = hangs.accept()
        showing = shown._showing
        for _ in range(3):
            shown.catch_up()
        assert shown._showing is showing, "one is held up already"
        assert showing.is_alive()
        hangs.close()
        connection.close()
    assert not shown._showing.is_alive()
    assert TrackedRun.read(run.tracking_record).logged_step == 3
