"""Folders that are named by variables, or lie in a home folder."""

from pathlib import Path

import pytest

from infra import settings
from infra.refusal import Refusal


def test_a_home_folder_is_only_needed_where_a_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _user: {}["no such user"])
    monkeypatch.setenv("DRAFTSMITH_CACHE", "/somewhere")
    assert settings.cache_folder() == Path("/somewhere")
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    with pytest.raises(Refusal, match=r"\$DRAFTSMITH_CACHE .* write the folder's whole path"):
        settings.cache_folder()


def test_a_folder_that_the_database_s_address_cannot_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DRAFTSMITH_RUNS", "/what?/runs")
    with pytest.raises(Refusal, match=r"/what\?/runs: .*cannot hold a \?: set \$DRAFTSMITH_RUNS"):
        settings.tracking_uri()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (".env", "prefect_api_url='https://prefect.corp/api'\n"),
        ("prefect.toml", '[api]\nurl = "https://prefect.corp/api"\n'),
        ("pyproject.toml", '[tool.prefect.api]\nurl = "https://prefect.corp/api"\n'),
    ],
)
def test_a_prefect_server_that_a_file_names_is_used(
    file: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert settings.prefect_api_url() is None
    (tmp_path / file).write_text(content)
    assert settings.prefect_api_url() == "https://prefect.corp/api"
    monkeypatch.setenv("PREFECT_API_URL", "https://other/api")
    assert settings.prefect_api_url() == "https://other/api"
