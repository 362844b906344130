"""The deployments of one draft, by their description."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.drift.config import WatchConfig
from infra.refusal import Refusal
from models.config.recipe import as_recipe, load_recipe
from tasks.deployments import Deployed, Settings, keep_changes
from tasks.draft_deployments import DeployOptions, _renamed, described, overruled
from tasks.events import PROMOTED, UNPROVEN
from tasks.side_effects import artifact_key

RECIPES = Path(__file__).parents[2] / "recipes"


def by_flow(recipe: str, overrides: list[str], **options) -> dict[str, dict]:
    config = load_recipe(RECIPES / f"{recipe}.yaml", overrides)
    return {each["entrypoint"].rpartition(".")[2]: each for each in described(config, DeployOptions(**options))}


def test_a_recipe_is_deployed_as_it_is() -> None:
    found = by_flow("tiny", [])
    assert list(found) == ["retrain", "promote", "rollback", "benchmark_champion"]
    assert as_recipe(found["retrain"]["parameters"]["config"], "here") == load_recipe(RECIPES / "tiny.yaml")
    assert all(each["name"] == "tiny" and "draft:draft-tiny" in each["tags"] for each in found.values())
    assert "schedules" not in found["retrain"]
    assert [one["active"] for one in found["benchmark_champion"]["schedules"]] == [False]


def test_a_server_that_is_away_ends_no_training() -> None:
    """Prefect ends a run of a deployment with a limit when it cannot renew the run's slot for some minutes."""
    found = by_flow("tiny", [])
    assert "concurrency_limit" not in found["retrain"]
    assert found["promote"]["concurrency_limit"]["limit"] == 1


def test_options_add_schedules_a_watch_and_a_regeneration() -> None:
    servers = ("http://one:30000", "http://two:30000")
    found = by_flow("tiny", ["data.regeneration={}"], cron="0 3 * * 0", watch=servers, requests="/logs")
    assert "regenerate" in found
    assert found["retrain"]["schedules"][0]["cron"] == "0 3 * * 0"
    assert found["watch_traffic"]["parameters"]["config"]["servers"] == list(servers)
    watched = WatchConfig.model_validate(found["watch_traffic"]["parameters"]["config"])
    assert (watched.draft, watched.requests and watched.requests.folder) == ("draft-tiny", "/logs")
    paused = by_flow("tiny", [], cron="0 3 * * 0", watch=servers, paused=True)
    schedules = [schedule for each in paused.values() for schedule in each.get("schedules", [])]
    assert all(each["paused"] for each in paused.values())
    assert not any(schedule["active"] for schedule in schedules)


@pytest.mark.parametrize("source", ["python-docs", "it's/here.jsonl", "a\\b.jsonl"])
def test_an_alarm_retrains_from_the_champion_on_what_came_with_it(source: str) -> None:
    from jinja2 import Environment

    (trigger,) = by_flow("tiny", [f"data.source={yaml.safe_dump(source).strip()}"])["retrain"]["triggers"]
    config = trigger["parameters"]["config"]
    assert trigger["match"] == {"prefect.resource.id": "draft-tiny"}
    assert config["training"]["start_from"] == "champion"
    template = Environment().from_string(config["data"]["source"]["template"])
    assert template.render(event={"payload": {"dataset": "fresh.jsonl"}}) == "fresh.jsonl"
    assert template.render(event={"payload": {}}) == source


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watch": ("http://user:pa55word@host:1",)}, "--watch .*password"),
        ({"watch": ("http://host:1",), "requests": "s3://key:pa55word@bucket"}, "--requests .*password"),
    ],
)
def test_an_address_with_a_password_is_refused_before_it_is_written_down(options: dict, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        by_flow("tiny", [], **options)
    assert "pa55word" not in str(refused.value)


def test_runs_start_where_it_was_said() -> None:
    found = by_flow("tiny", [], folder="/srv/draftsmith")
    assert {each["work_pool"]["job_variables"]["working_dir"] for each in found.values()} == {"/srv/draftsmith"}


def retraining(cron: str, active: bool) -> dict[str, Any]:
    schedules = {"retrain": {"active": active, "schedule": {"cron": cron, "timezone": "UTC"}}}
    return {"paused": not active, "schedules": schedules, "parameters": {"config": {"seed": 1}}}


@pytest.mark.parametrize(
    ("given", "before", "fresh", "counts"),
    [
        # Resumed in the page, paused again by the command; and the other way round.
        ({"paused": True}, retraining("0 3 * * *", True), retraining("0 3 * * *", False), "fresh"),
        ({"paused": False}, retraining("0 3 * * *", False), retraining("0 3 * * *", True), "fresh"),
        ({}, retraining("0 3 * * *", False), retraining("0 3 * * *", True), "before"),
        ({"cron": "0 4 * * *"}, retraining("0 5 * * 1", True), retraining("0 4 * * *", True), "fresh"),
        # Switched off in the page.
        (
            {"cron": "0 4 * * *"},
            retraining("0 3 * * *", False) | {"paused": False},
            retraining("0 4 * * *", True),
            "fresh",
        ),
        (
            {"cron": "0 4 * * *"},
            retraining("0 3 * * *", True) | {"schedules": {}},
            retraining("0 4 * * *", True),
            "fresh",
        ),
        ({"paused": False}, retraining("0 3 * * *", True) | {"schedules": {}}, retraining("0 3 * * *", True), "before"),
    ],
)
def test_a_given_option_counts_over_what_was_changed_in_the_page(
    given: dict, before: Settings, fresh: Settings, counts: str
) -> None:
    """What was deployed last has the options of the command, but for its cron."""
    last = fresh if "paused" in given else retraining("0 3 * * *", True)
    kept = overruled(keep_changes(before, last, fresh), fresh, DeployOptions(**given))
    assert kept == {"before": before, "fresh": fresh}[counts]


def test_a_given_server_and_folder_count_over_those_of_the_page_and_nothing_else() -> None:
    def watching(server: str, folder: str, seed: int) -> Settings:
        config = {"servers": [server], "requests": {"folder": folder}, "seed": seed}
        return {"paused": False, "schedules": {}, "parameters": {"config": config}}

    kept, fresh = watching("http://page:1", "/page", 7), watching("http://given:1", "/given", 1)
    given = DeployOptions(watch=("http://given:1",), requests="/given")
    assert overruled(kept, fresh, given) == watching("http://given:1", "/given", 7)
    assert overruled(kept, fresh, DeployOptions()) == kept
    retrain = retraining("0 3 * * *", True)
    assert overruled(retrain, retrain, given) == retrain


def test_a_recipe_s_new_name_takes_over_what_was_changed_under_the_old_one() -> None:
    names = ["retrain/new", "promote/new"]
    triggers = ["retrain/new when draft-a drifts"]
    renamed = _renamed(["retrain/old", "promote/old", "watch-traffic/old"], names, triggers)
    assert renamed == {
        "retrain/old": "retrain/new",
        "promote/old": "promote/new",
        "retrain/old when draft-a drifts": "retrain/new when draft-a drifts",
    }
    old = Deployed(
        deployments={"retrain/old": {"paused": True}}, automations={"retrain/old when draft-a drifts": False}
    )
    new = Deployed(deployments={"retrain/new": {"paused": True}}, automations={triggers[0]: False})
    assert old.renamed(renamed) == new
    both = Deployed(deployments={"retrain/old": {"paused": True}, "retrain/new": {"paused": False}})
    assert both.renamed(renamed).deployments == {"retrain/new": {"paused": False}}, "it had taken over before"


def test_two_drafts_share_no_key() -> None:
    names = ["qwen-3", "Qwen-3", "qwen_3", "qwen.3", "qwen3", "qwen-3-"]
    assert len({artifact_key("report", name) for name in names}) == len(names)
    assert artifact_key("report", "draft-quickstart") == "report-draft-quickstart"


@pytest.mark.parametrize("start", ["champion", "furthest"])
def test_a_run_that_learned_from_users_is_followed_by_another_until_one_gains_nothing(start: str) -> None:
    live = "{servers: [{address: 'http://127.0.0.1:1', socket: /run/a}], consent: users agreed, retention_days: 1}"
    settings = ["generator.engine=serving", f"generator.live={live}", "data.source=live", "data.max_samples=64"]
    settings += ["data.overlong=truncate", f"training.start_from={start}"]
    drifted, promoted = by_flow("tiny", settings)["retrain"]["triggers"]
    for trigger in (drifted, promoted):
        assert trigger["match"] == {"prefect.resource.id": "draft-tiny"}
        config = as_recipe(trigger["parameters"]["config"], "here")
        # Whatever prompts came with the alarm.
        assert config == load_recipe(RECIPES / "tiny.yaml", settings)
    assert promoted["expect"] == [PROMOTED, UNPROVEN]
