"""What of a deployment is the operator's, and what is prefect.yaml's."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.refusal import Refusal
from tasks import deployments
from tasks.deployments import (
    OTHERS_S,
    RECORDED,
    Deployed,
    DeploymentRecord,
    Settings,
    keep_changes,
    refuse_other_installation,
)


def settings(**changes: Any) -> Settings:
    schedules = weekly(False, "0 3 * * 0")
    usual = {"paused": False, "limit": 1, "collision": "ENQUEUE", "parameters": {"keep": 1}, "schedules": schedules}
    return usual | changes


def weekly(active: bool, cron: str) -> dict[str, Any]:
    return {"weekly": {"active": active, "schedule": {"cron": cron}}}


def test_without_changes_the_new_file_counts() -> None:
    fresh = settings(limit=2, parameters={"keep": 2}, schedules=weekly(False, "0 4 * * 0"))
    assert keep_changes(settings(), settings(), fresh) == fresh


def test_an_operator_s_changes_stay_beside_the_file_s() -> None:
    before = settings(paused=True, limit=5, schedules=weekly(True, "0 3 * * 0"))
    fresh = settings(parameters={"keep": 2}, schedules=weekly(False, "0 4 * * 0"))
    kept = keep_changes(before, settings(), fresh)
    assert kept == settings(paused=True, limit=5, parameters={"keep": 2}, schedules=weekly(True, "0 4 * * 0"))


def test_a_value_that_was_changed_keeps_no_other_of_the_file_s_away() -> None:
    def recipe(rate: float, steps: int, **more: Any) -> Settings:
        return settings(parameters={"config": {"training": {"learning_rate": rate, "max_steps": steps}, **more}})

    kept = keep_changes(recipe(1.0, 20), recipe(1.0, 10), recipe(2.0, 10, seed=1))
    assert kept == recipe(2.0, 20, seed=1)
    section = settings(parameters={"config": {"training": None}})
    assert keep_changes(recipe(1.0, 20), recipe(1.0, 10), section) == section


def test_a_schedule_takes_the_new_time_in_the_zone_that_was_set() -> None:
    def zone(cron: str, name: str) -> Settings:
        schedule = {"cron": cron, "timezone": name}
        return settings(schedules={"weekly": {"active": True, "schedule": schedule}})

    kept = keep_changes(zone("0 3 * * 0", "Europe/Berlin"), zone("0 3 * * 0", "UTC"), zone("0 4 * * 0", "UTC"))
    assert kept == zone("0 4 * * 0", "Europe/Berlin")


def test_after_a_command_that_failed_what_it_has_not_deployed_is_as_before() -> None:
    old, new = settings(limit=1), settings(limit=2)
    last = Deployed(deployments={"a": old, "b": old}, automations={"x": True})
    before = Deployed(deployments={"a": old, "b": settings(paused=True)}, automations={"x": False})
    fresh = Deployed(deployments={"a": new, "b": settings(paused=True), "c": new}, automations={"x": False})
    assert last.over(before, fresh) == Deployed(deployments={"a": new, "b": old, "c": new}, automations={"x": True})


def test_a_schedule_that_was_added_stays_and_one_that_was_removed_stays_away() -> None:
    added = {"active": True, "schedule": {"interval": 60}}
    kept = keep_changes(settings(schedules={"mine": added}), settings(), settings())
    assert kept["schedules"] == {"mine": added}


def test_a_schedule_that_the_file_no_longer_has_goes() -> None:
    before = settings(schedules=weekly(True, "0 3 * * 0"))
    assert keep_changes(before, settings(), settings(schedules={}))["schedules"] == {}


def test_no_draft_shares_the_stack_s_record() -> None:
    keys = [deployments._record_key(draft) for draft in (None, "shared", "stack", "draft-stack")]
    assert len(set(keys)) == len(keys)


def test_prefect_s_page_of_the_record_says_what_each_field_is() -> None:
    fields = DeploymentRecord.model_json_schema()["properties"]
    assert all(fields[name]["description"] for name in RECORDED)
    assert "Do not edit it" in str(DeploymentRecord._description)
    old = DeploymentRecord.model_validate({"since": 1_795_907_254.29})  # of an earlier version
    assert old.model_dump(mode="json")["since"].startswith("2026-11-28T23:07:34")


def test_what_another_machine_deploys_now_is_not_taken_for_interrupted() -> None:
    record = DeploymentRecord(interrupted={}, by="other", since=datetime.now(UTC))
    record.refuse_other("draft-a")
    record.interrupted = {"deployments": {}}
    with pytest.raises(Refusal, match="draft-a: a command on other deploys the same"):
        record.refuse_other("draft-a")
    record.since -= timedelta(seconds=OTHERS_S)
    record.refuse_other("draft-a")


def test_the_stack_s_deployments_of_another_installation_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = SimpleNamespace(job_variables={"working_dir": str(tmp_path / "theirs")})
    client = SimpleNamespace(read_deployment_by_name=lambda _name: theirs)
    monkeypatch.setattr(deployments, "get_client", lambda sync_client: nullcontext(client))
    with pytest.raises(Refusal, match=f"start in {tmp_path}/theirs, and this is {tmp_path}/ours"):
        refuse_other_installation(tmp_path / "ours")
    refuse_other_installation(tmp_path / "theirs")
