"""What of a deployment is the operator's, and what is prefect.yaml's."""

from typing import Any

from tasks.deployments import Settings, keep_changes


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


def test_a_schedule_that_was_added_stays_and_one_that_was_removed_stays_away() -> None:
    added = {"active": True, "schedule": {"interval": 60}}
    kept = keep_changes(settings(schedules={"mine": added}), settings(), settings())
    assert kept["schedules"] == {"mine": added}


def test_a_schedule_that_the_file_no_longer_has_goes() -> None:
    before = settings(schedules=weekly(True, "0 3 * * 0"))
    assert keep_changes(before, settings(), settings(schedules={}))["schedules"] == {}
