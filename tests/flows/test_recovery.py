"""What `recover` says of flow runs that fell silent, asked of a real server."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.files.locks import hold
from infra.refusal import Refusal
from infra.run.recovery import ATTEMPTS
from models.config.recipe import load_recipe
from tasks.deployments import schedule_interrupted
from tasks.recovery import ENTRYPOINTS, SUBMISSION, look_at, start_again
from tasks.run import HOST_LABEL, RUNS_LABEL, RunsPlace, open_run

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


def test_a_flow_that_has_just_released_its_run_is_not_dead(
    stack: Any, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between two looks."""
    looks = list[str]()

    def wait(_seconds: float) -> None:
        looks.append(state_of(stack, silent))
        say(stack, silent, "COMPLETED")

    monkeypatch.setattr("tasks.recovery.ENDING_S", 120.0)
    monkeypatch.setattr("tasks.recovery.time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    assert look_at(silent) is None
    assert looks == ["RUNNING"]
    assert state_of(stack, silent) == "COMPLETED"


def test_a_run_whose_process_lives_is_not_dead(stack: Any, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.run.ownership.LAST_PROCESSES_S", 1.0)
    with hold(stack.runs / RUN / "run.lock"):
        assert look_at(silent) is None
    assert state_of(stack, silent) == "RUNNING"


def test_a_silent_flow_without_a_process_is_dead(stack: Any, silent: str) -> None:
    dead = look_at(silent)
    assert dead is not None
    assert dead.parameters["run"] == RUN
    assert state_of(stack, silent) == "CRASHED"


def test_a_flow_run_is_dead_once_its_submission_takes_too_long(
    stack: Any, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(stack, silent, "PENDING")
    assert look_at(silent) is None
    assert state_of(stack, silent) == "PENDING"
    monkeypatch.setattr("tasks.recovery.SUBMISSION", timedelta())
    assert look_at(silent) is not None
    assert state_of(stack, silent) == "CRASHED"


def test_a_flow_run_whose_run_is_kept_elsewhere_is_not_called_dead(
    stack: Any, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @flow
    def opens_a_run() -> str:
        with open_run(load_recipe(ROOT / "recipes" / "tiny.yaml"), None):
            return str(flow_run.get_id())

    elsewhere = tmp_path / "runs"
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(elsewhere))
    labels = stack.get(f"flow_runs/{opens_a_run()}")["labels"]
    assert RunsPlace.of(labels) == RunsPlace.here()
    stack.patch(f"flow_runs/{silent}/labels", {name: labels[name] for name in (HOST_LABEL, RUNS_LABEL)})
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "other"))
    with pytest.raises(Refusal, match=f"{elsewhere} on .*looks in {tmp_path / 'other'} on .*nothing was changed"):
        look_at(silent)
    assert state_of(stack, silent) == "RUNNING"


@pytest.mark.parametrize("name", ["regenerate", "recover"])
def test_what_was_being_submitted_when_the_workers_ended_is_submitted_again(stack: Any, silent: str, name: str) -> None:
    deployed = stack.get(f"deployments/name/{name}/{name}")
    body = {"parameters": {"flow_run": silent} if name == "recover" else deployed["parameters"]}
    interrupted = stack.post(f"deployments/{deployed['id']}/create_flow_run", body)["id"]
    pending = {"state": {"type": "PENDING"}}  # not by force, as a worker: it takes the deployment's concurrency slot
    assert stack.post(f"flow_runs/{interrupted}/set_state", pending)["status"] == "ACCEPT"
    with temporary_settings({PREFECT_API_URL: stack.api}):
        assert schedule_interrupted() == [stack.get(f"flow_runs/{interrupted}")["name"]]
    assert (state_of(stack, interrupted), state_of(stack, silent)) == ("SCHEDULED", "RUNNING")
    assert stack.post(f"flow_runs/{interrupted}/set_state", pending)["state"]["name"] == "Pending", "the slot is free"
    say(stack, interrupted, "CANCELLED")


def test_a_run_whose_deployment_is_deleted_is_named_as_one(
    stack: Any, silent: str, caplog: pytest.LogCaptureFixture
) -> None:
    retrain = stack.get("deployments/name/retrain/retrain")
    alike = {name: retrain[name] for name in ("flow_id", "tags", "entrypoint", "parameters")}
    renamed = stack.post("deployments/", alike | {"name": "renamed"})["id"]
    body = {"parameters": {"config": retrain["parameters"]["config"], "run": RUN}}
    flow_run = stack.post(f"deployments/{renamed}/create_flow_run", body)["id"]
    say(stack, flow_run, "CRASHED")
    stack.delete(f"deployments/{renamed}")
    assert look_at(flow_run) is None
    assert "its deployment was deleted" in caplog.text
    assert f"`draftsmith retrain --resume {RUN}`" in caplog.text


FOREIGN = """
from prefect import flow

@flow(name="retrain")
def retrain():
    return 1
"""


@pytest.fixture
def foreign(stack: Any, tmp_path: Path) -> str:
    """A run of somebody else's flow that is called `retrain`, too: it lives, and sends no heartbeats."""
    (tmp_path / "theirs.py").write_text(FOREIGN)
    stack.prefect(
        "deploy", f"{tmp_path / 'theirs.py'}:retrain", "--name", "theirs", "--pool", "draftsmith", "--no-prompt"
    )
    deployed = stack.get("deployments/name/retrain/theirs")
    flow_run = stack.post(f"deployments/{deployed['id']}/create_flow_run", {})["id"]
    say(stack, flow_run, "RUNNING")
    return flow_run


@pytest.mark.parametrize("state", ["RUNNING", "CRASHED"])
def test_a_foreign_flow_of_the_same_name_is_left_alone(stack: Any, foreign: str, state: str) -> None:
    say(stack, foreign, state)
    before = stack.flow_runs("retrain")
    with temporary_settings({PREFECT_API_URL: stack.api}):
        assert look_at(foreign) is None
    assert state_of(stack, foreign) == state
    assert stack.flow_runs("retrain") == before


def test_only_runs_of_our_deployments_start_a_recovery() -> None:
    deployments = {one["name"]: one for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    wanted = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.draftsmith-resumable"}
    assert [trigger["match_related"] for trigger in deployments["recover"]["triggers"]] == [wanted] * 3
    tagged = {one["entrypoint"] for one in deployments.values() if "draftsmith-resumable" in one["tags"]}
    assert tagged == ENTRYPOINTS


def test_a_run_that_dies_before_it_has_a_folder_is_given_up_in_the_end(stack: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(stack.runs))
    config = load_recipe(ROOT / "recipes" / "tiny.yaml").model_dump(mode="json")
    deployed = stack.get("deployments/name/retrain/retrain")
    flow_run = stack.post(f"deployments/{deployed['id']}/create_flow_run", {"parameters": {"config": config}})["id"]
    with temporary_settings({PREFECT_API_URL: stack.api}):
        for restart in range(1, ATTEMPTS + 1):
            say(stack, flow_run, "CRASHED")
            dead = look_at(flow_run)
            assert dead
            flow_run = start_again(dead)
            assert f"restart-{restart}" in stack.get(f"flow_runs/{flow_run}")["tags"]
        say(stack, flow_run, "CRASHED")
        dead = look_at(flow_run)
        assert dead
        with pytest.raises(Refusal, match="died 4 times before it had made a run folder"):
            start_again(dead)


def test_flows_say_that_they_live_thrice_before_they_are_called_silent() -> None:
    deployments = {one["name"]: one for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    waits, submission = (one for one in deployments["recover"]["triggers"] if one.get("posture") == "Proactive")
    assert timedelta(seconds=submission["within"]) > SUBMISSION
    for deployment in deployments.values():
        if "draftsmith-resumable" in deployment["tags"]:
            environment = deployment["work_pool"]["job_variables"]["env"]
            assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= waits["within"]
