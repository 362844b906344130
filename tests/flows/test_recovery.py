"""What `recover` says of flow runs that fell silent, asked of a real server."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.locks import hold
from models.config import load_recipe
from tasks.recovery import look_at

ROOT = Path(__file__).parents[2]
RUN = "silent"


@pytest.fixture
def silent(stack: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A flow run that a worker seems to run, and its run's folder."""
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(stack.runs))
    monkeypatch.setattr("tasks.recovery.ENDING_S", 3.0)
    (stack.runs / RUN).mkdir(parents=True, exist_ok=True)
    config = load_recipe(ROOT / "recipes" / "tiny.yaml").model_dump(mode="json")
    deployed = stack.get("deployments/name/retrain/retrain")
    body = {"parameters": {"config": config, "run": RUN}}
    flow_run = stack.post(f"deployments/{deployed['id']}/create_flow_run", body)["id"]
    say(stack, flow_run, "RUNNING")
    with temporary_settings({PREFECT_API_URL: stack.api}):
        yield flow_run
    say(stack, flow_run, "CANCELLED")


def say(stack: Any, flow_run: str, state: str) -> None:
    stack.post(f"flow_runs/{flow_run}/set_state", {"state": {"type": state}, "force": True})


def state_of(stack: Any, flow_run: str) -> str:
    return stack.get(f"flow_runs/{flow_run}")["state"]["type"]


def test_a_flow_that_has_just_let_go_of_its_run_is_not_dead(stack: Any, silent: str) -> None:
    held = threading.Event()

    def end() -> None:
        with hold(stack.runs / RUN / "run.lock"):
            held.set()
            time.sleep(2)
        time.sleep(1)
        say(stack, silent, "COMPLETED")

    flow = threading.Thread(target=end)
    flow.start()
    assert held.wait(10)
    assert look_at(silent) is None
    flow.join(30)
    assert state_of(stack, silent) == "COMPLETED"


def test_a_silent_flow_without_a_process_is_dead(stack: Any, silent: str) -> None:
    dead = look_at(silent)
    assert dead is not None
    assert dead.parameters["run"] == RUN
    assert state_of(stack, silent) == "CRASHED"


def test_flows_say_that_they_live_thrice_before_they_are_called_silent() -> None:
    deployments = {one["name"]: one for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    (waits,) = (one for one in deployments["recover"]["triggers"] if one.get("posture") == "Proactive")
    (flows,) = (names for key, names in waits["match_related"].items() if key.endswith("name"))
    for name in flows:
        environment = deployments[name]["work_pool"]["job_variables"]["env"]
        assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= waits["within"]
