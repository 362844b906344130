"""`draftsmith deploy` and `undeploy` against a real Prefect server."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.blocks.notifications import SlackWebhook
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessJobConfiguration

from tasks.deployments import DeploymentRecord
from tasks.overview import LOOKED_AT, runs_of

ROOT = Path(__file__).parents[2]
WATCHED, CRON = "http://127.0.0.1:30000", "0 4 29 2 *"
"""Prefect plans no run of this one, among those that the tests make, but in a leap year's February."""
TRIES = 5
CHANGING = {"updated", "created", "last_polled", "status"}


def draftsmith(stack: Any, *arguments: str, refused: bool = False) -> str:
    command = [sys.executable, "-c", "from flows.command_line import main; main()", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=stack.environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode == 2) == refused, done.stdout + done.stderr
    assert refused or done.returncode == 0, done.stdout + done.stderr
    return done.stderr if refused else done.stdout


def deployed(stack: Any, draft: str) -> dict[str, Any]:
    """A draft's deployments by flow, without what changes by itself."""
    found = stack.post("deployments/filter", {"deployments": {"tags": {"all_": [f"draft:{draft}"]}}})
    return {one["entrypoint"].rpartition(".")[2]: without(one, CHANGING) for one in found}


def without(tree: Any, names: set[str]) -> Any:
    if isinstance(tree, dict):
        return {name: without(value, names) for name, value in tree.items() if name not in names}
    return [without(value, names) for value in tree] if isinstance(tree, list) else tree


def automations(stack: Any, draft: str) -> list[Any]:
    return [one for one in stack.post("automations/filter", {}) if draft in one["name"]]


def whole(stack: Any) -> set[str]:
    """Everything that is deployed, by id."""
    return {one["id"] for what in ("deployments", "automations") for one in stack.post(f"{what}/filter", {})}


@pytest.fixture
def block(stack: Any) -> str:
    with temporary_settings({PREFECT_API_URL: stack.api}):
        SlackWebhook(url="https://hooks.slack.com/services/T0000000/B0000000/000000000000000000000000").save(
            "ops", overwrite=True
        )  # type: ignore[arg-type]
    return "slack-webhook/ops"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_deployed_twice_changed_and_gone(stack: Any, block: str, tmp_path: Path) -> None:
    tiny = str(ROOT / "recipes" / "tiny.yaml")
    shared = whole(stack)
    missing = draftsmith(stack, "deploy", tiny, "--notify", "slack-webhook/none", refused=True)
    assert "there is no such block" in missing
    draftsmith(stack, "deploy", tiny, "--cron", CRON, "--watch", WATCHED, "--notify", block)
    first, told = deployed(stack, "draft-tiny"), automations(stack, "draft-tiny")
    assert set(first) == {"retrain", "promote", "rollback", "benchmark_champion", "watch_traffic"}
    assert first["retrain"]["schedules"][0]["schedule"]["cron"] == CRON
    assert len(told) == 2
    with temporary_settings({PREFECT_API_URL: stack.api}):
        kept = DeploymentRecord.of("draft-tiny").last
    assert kept
    assert len(kept["deployments"]) == len(first)
    assert list(kept["automations"]) == ["retrain/tiny when draft-tiny drifts"]
    shared_retrain = stack.get("deployments/name/retrain/retrain")
    for alike in ("pull_steps", "path", "entrypoint", "job_variables"):
        assert first["retrain"][alike] == shared_retrain[alike], alike

    draftsmith(stack, "deploy", tiny)
    again = deployed(stack, "draft-tiny")
    assert without(again, {"id", "schedules"}) == without(first, {"id", "schedules"})
    assert {flow: one["id"] for flow, one in again.items()} == {flow: one["id"] for flow, one in first.items()}
    assert {one["name"] for one in automations(stack, "draft-tiny")} == {one["name"] for one in told}

    (schedule,) = again["retrain"]["schedules"]
    place = f"deployments/{again['retrain']['id']}"
    stack.patch(f"{place}/schedules/{schedule['id']}", {"active": False})
    other_servers = {"servers": ["http://127.0.0.1:30002"]}
    change_parameters(stack, "watch_traffic", lambda parameters: parameters["config"].update(other_servers))
    draftsmith(stack, "deploy", tiny, "--watch", "http://127.0.0.1:30001")
    changed = deployed(stack, "draft-tiny")
    assert [one["active"] for one in changed["retrain"]["schedules"]] == [False]
    assert changed["watch_traffic"]["parameters"]["config"]["servers"] == ["http://127.0.0.1:30001"]

    check_another_folder(stack, tiny, tmp_path)

    check_pause_and_name(stack, tiny, changed)
    check_runs(stack, again["retrain"]["id"])
    page = tmp_path / "overview.html"
    assert str(page) in draftsmith(stack, "drafts", "overview", "--page", str(page))
    assert page.read_text().startswith("<!doctype html>")
    check_shared_trigger(stack)
    for draft in ("draft-tiny", "draft-other", "draft-quickstart"):
        assert "deployments deleted" in draftsmith(stack, "undeploy", draft)
        assert deployed(stack, draft) == {}
        assert not [one for one in automations(stack, draft) if one["id"] not in shared or not one["enabled"]]
    assert "is not deployed" in draftsmith(stack, "undeploy", "draft-tiny")
    assert whole(stack) == shared
    waiting = {"tags": {"any_": ["draft:draft-tiny"]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    assert not stack.post("flow_runs/filter", {"flow_runs": waiting})
    assert not list((Path(stack.environment["DRAFTSMITH_RUNS"]) / ".deployments").iterdir())


def change_parameters(stack: Any, flow: str, change: Callable[[Any], None]) -> None:
    """As in Prefect's page, of draft-tiny's deployment."""
    found = deployed(stack, "draft-tiny")[flow]
    change(found["parameters"])
    stack.patch(f"deployments/{found['id']}", {"parameters": found["parameters"]})


def check_pause_and_name(stack: Any, tiny: str, changed: dict[str, Any]) -> None:
    """`--pause` stays, also under a recipe's new name, and so does what was changed in Prefect; a recipe's name is one
    draft's; no two drafts share a limit."""
    draftsmith(stack, "deploy", tiny, "name=other", "--cron", CRON, "--pause")
    other = deployed(stack, "draft-other")
    assert all(one["paused"] for one in other.values())
    stack.patch(f"deployments/{other['retrain']['id']}", {"paused": False})
    (trigger,) = automations(stack, "draft-other")
    stack.patch(f"automations/{trigger['id']}", {"enabled": False})
    draftsmith(stack, "deploy", tiny, "name=renamed", "tracking.registered_model=draft-other")
    renamed = deployed(stack, "draft-other")
    assert {one["name"] for one in renamed.values()} == {"renamed"}
    assert [flow for flow, one in renamed.items() if not one["paused"]] == ["retrain"]
    named = {one["name"]: one["enabled"] for one in automations(stack, "draft-other")}
    assert named == {"retrain/renamed when draft-other drifts": False}
    (trigger,) = automations(stack, "draft-other")
    stack.patch(f"automations/{trigger['id']}", {"enabled": True})
    taken = draftsmith(stack, "deploy", tiny, "name=renamed", "tracking.registered_model=draft-third", refused=True)
    assert "is deployed for draft-other" in taken
    limits = [one["global_concurrency_limit"] for one in (*changed.values(), *other.values())]
    names = [limit["name"] for limit in limits if limit]
    assert len(names) == len(set(names)) > 4


def check_shared_trigger(stack: Any) -> None:
    """One alarm starts one retraining: the shared file's gives way to the draft's own."""
    draftsmith(stack, "deploy", str(ROOT / "recipes" / "quickstart.yaml"))
    retrain = deployed(stack, "draft-quickstart")["retrain"]["id"]
    starting = {
        one["actions"][0]["deployment_id"]: one["enabled"]
        for one in stack.post("automations/filter", {})
        if "draftsmith.draft.drifted" in one["trigger"].get("expect", ())
    }
    assert len(starting) == 4  # of the shared file, and of three drafts
    assert [deployment for deployment, enabled in starting.items() if not enabled] == [
        stack.get("deployments/name/retrain/retrain")["id"]
    ]
    assert starting[retrain]


def check_another_folder(stack: Any, recipe: str, folder: Path) -> None:
    """From another folder, as a pipeline deploys: the recipe counts, and options and the operator's changes stay."""
    assert "is no schedule" in draftsmith(stack, "deploy", recipe, "--cron", "0 3 * * 8-9", refused=True)
    change_parameters(stack, "retrain", lambda parameters: parameters["config"]["training"].update(log_steps=7))
    elsewhere = SimpleNamespace(environment=stack.environment | {"DRAFTSMITH_RUNS": str(folder / "elsewhere")})
    assert f"Runs start in {folder}, before in {ROOT}" in draftsmith(
        elsewhere, "deploy", recipe, "--folder", str(folder), "--cron", CRON
    )
    said = draftsmith(elsewhere, "deploy", recipe, "training.max_steps=33")
    assert f"Runs start in {folder}, with the code there" in said
    assert f"`--folder {ROOT}`" in said
    places = {one["job_variables"]["working_dir"] for one in deployed(stack, "draft-tiny").values()}
    assert places == {str(folder)}
    assert "retrain/tiny: parameters.config.training.log_steps" in said
    found = deployed(stack, "draft-tiny")
    training = found["retrain"]["parameters"]["config"]["training"]
    assert (training["max_steps"], training["log_steps"]) == (33, 7)
    assert [one["active"] for one in found["retrain"]["schedules"]] == [True], "--cron switches it on again"
    assert found["watch_traffic"]["parameters"]["config"]["servers"] == ["http://127.0.0.1:30001"]


def check_runs(stack: Any, retrain: str) -> None:
    """More runs wait than are looked at: the next one and the last ones are found nevertheless."""
    now = datetime.now(UTC)
    for days in range(LOOKED_AT + 5, 0, -1):
        details = {"scheduled_time": (now + timedelta(days=days)).isoformat()}
        waiting = {"type": "SCHEDULED", "state_details": details}
        stack.post(f"deployments/{retrain}/create_flow_run", {"state": waiting})
    ended = stack.post(f"deployments/{retrain}/create_flow_run", {"state": {"type": "PENDING"}})["id"]
    stack.post(f"flow_runs/{ended}/set_state", {"state": {"type": "FAILED"}, "force": True})
    with temporary_settings({PREFECT_API_URL: stack.api}), get_client(sync_client=True) as client:
        following, last = runs_of(client, ["draft-tiny"])["draft-tiny"]["retrain"]
    assert following.expected_start_time is not None
    assert following.expected_start_time - now == timedelta(days=1)
    assert (str(last.id), last.state_name) == (ended, "Failed")


def left(stack: Any) -> tuple[Any, ...]:
    """All that a draft's deployments could leave behind: in Prefect, and in the folder of what was deployed."""
    limits = {one["name"] for one in stack.post("v2/concurrency_limits/filter", {})}
    there, asked = whole(stack), {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED", "PENDING"]}}}}
    # Prefect plans runs of the stack's own schedules at any moment: they are nobody's leftovers.
    waiting = {one["id"] for one in stack.post("flow_runs/filter", asked) if one["deployment_id"] not in there}
    folder = Path(stack.environment["DRAFTSMITH_RUNS"]) / ".deployments"
    records = {one["name"] for one in stack.post("block_documents/filter", {})}
    return there, limits | records, waiting, {one.name for one in folder.glob("*")} if folder.exists() else set()


def killed_after(stack: Any, seconds: float, *arguments: str) -> float | None:
    """Kill a command by SIGKILL and alone: what it started is left behind. Returns the seconds that it took, if it had
    ended before."""
    command = [sys.executable, "-c", "from flows.command_line import main; main()", *arguments]
    begun = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=stack.environment, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    return time.monotonic() - begun


def kill_during(stack: Any, moment: float, takes: float, asked: list[str], undo: list[str]) -> float:
    """Kill a command at a share of the seconds that it takes: where it had ended before, once more, after `undo`.

    Returns the seconds that it takes: fewer than before where the machine was busy then.
    """
    for _ in range(TRIES):
        took = killed_after(stack, moment * takes, *asked)
        if took is None:
            return takes
        takes = 0.9 * took
        draftsmith(stack, *undo)
    pytest.fail(f"{asked[0]} ended {TRIES} times before it was killed")


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([0.7], marks=pytest.mark.slow),
        pytest.param([0.95, 0.9, 0.85, 0.75, 0.65, 0.6, 0.5, 0.4], marks=pytest.mark.long),
    ],
    ids=["one moment", "eight moments"],
)
@pytest.mark.timeout(1200)
def test_killed_at_any_point_they_leave_nothing(stack: Any, block: str, moments: list[float]) -> None:
    """Each kill at another moment of the command; the next `undeploy` comes at once."""
    asked = ["deploy", str(ROOT / "recipes" / "tiny.yaml"), "name=killed", "--cron", CRON, "--notify", block]
    before = left(stack)
    begun = time.monotonic()
    draftsmith(stack, *asked)
    deploying = time.monotonic() - begun
    begun = time.monotonic()
    draftsmith(stack, "undeploy", "draft-killed")
    undeploying = time.monotonic() - begun
    assert left(stack) == before
    undeploy = ["undeploy", "draft-killed"]
    for moment in moments:
        deploying = kill_during(stack, moment, deploying, asked, undeploy)
        draftsmith(stack, *undeploy)
        assert left(stack) == before, f"deploy killed at {moment:.0%}"
    for moment in moments:
        draftsmith(stack, *asked)
        undeploying = kill_during(stack, moment, undeploying, undeploy, asked)
        draftsmith(stack, *undeploy)
        assert left(stack) == before, f"undeploy killed at {moment:.0%}"


@pytest.mark.slow
def test_a_secret_block_in_a_work_pool_reaches_the_run_alone(stack: Any) -> None:
    """As docs/production.md says it: the pool keeps the block's name, the worker puts the secret in its place."""

    async def environment_of_a_run() -> Any:
        async with get_client() as client:
            await Secret(value="not for pages").save("kept", overwrite=True, client=client)  # type: ignore[misc]
            pool = await client.read_work_pool("draftsmith")
            template = pool.base_job_template
            template["variables"]["properties"]["env"]["default"] = {"HF_TOKEN": "{{ prefect.blocks.secret.kept }}"}
            await client.update_work_pool("draftsmith", WorkPoolUpdate(base_job_template=template))
            kept = (await client.read_work_pool("draftsmith")).base_job_template
            asked = stack.get("deployments/name/retrain/retrain")["job_variables"]
            found = await ProcessJobConfiguration.from_template_and_values(kept, asked, client=client)
            template["variables"]["properties"]["env"]["default"] = {}
            await client.update_work_pool("draftsmith", WorkPoolUpdate(base_job_template=template))
            return json.dumps(kept), found.env

    with temporary_settings({PREFECT_API_URL: stack.api}):
        shown, environment = asyncio.run(environment_of_a_run())
    assert "not for pages" not in shown
    assert environment["HF_TOKEN"] == "not for pages"
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
