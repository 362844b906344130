"""Passwords never reach a report."""

import pytest

from infra.shareable import without_passwords


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("postgresql+psycopg://me:s3cr:et@db:5432/x", "postgresql+psycopg://me:***@db:5432/x"),
        ("https://:token@mlflow.example/", "https://:***@mlflow.example/"),
        ("sqlite:////runs/ledger.sqlite", "sqlite:////runs/ledger.sqlite"),
        ("https://example.org:8080/a@b:c", "https://example.org:8080/a@b:c"),
        ({"ledger": {"url": "a://b:c@d"}, "ids": (1, None)}, {"ledger": {"url": "a://b:***@d"}, "ids": [1, None]}),
    ],
)
def test_passwords_are_hidden_and_nothing_else(setting: object, shown: object) -> None:
    assert without_passwords(setting) == shown
