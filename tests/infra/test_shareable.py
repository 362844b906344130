"""Passwords never reach a report."""

import re

import pytest

from infra.shareable import NO_PASSWORD, without_passwords


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("postgresql+psycopg://me:s3cr:et@db:5432/x", "postgresql+psycopg://me:***@db:5432/x"),
        ("https://:token@mlflow.example/", "https://:***@mlflow.example/"),
        ("postgresql://db/x?password=s3cret&sslmode=require", "postgresql://db/x?password=***&sslmode=require"),
        ("sqlite:////runs/ledger.sqlite", "sqlite:////runs/ledger.sqlite"),
        ("https://example.org:8080/a@b:c", "https://example.org:8080/a@b:c"),
        ({"ledger": {"url": "a://b:c@d"}, "ids": (1, None)}, {"ledger": {"url": "a://b:***@d"}, "ids": [1, None]}),
    ],
)
def test_passwords_are_hidden_and_nothing_else(setting: object, shown: object) -> None:
    assert without_passwords(setting) == shown
    if isinstance(setting, str):
        assert bool(re.search(NO_PASSWORD, setting)) == (shown == setting)
