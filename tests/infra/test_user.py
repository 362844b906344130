"""A container may run as a uid without a name."""

import os
import pwd

import pytest

from infra.user import user_name


def test_a_user_without_a_name_is_called_by_its_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: ("ada",))
    assert user_name() == "ada"

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert user_name() == str(os.getuid())
