"""Folders that are named by variables, or lie in a home folder; proxies."""

import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
import requests

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
    with pytest.raises(Refusal, match=r"no home folder.*set \$HOME"):
        settings.check_home_folder()


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


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server on loopback that answers everything."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, ""),
        ({"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "intranet, 10.0.0.0/8"}, "intranet,10.0.0.0/8,"),
        ({"ALL_PROXY": "http://127.0.0.1:9", "no_proxy": "localhost"}, "localhost,"),
        ({"all_proxy": "http://127.0.0.1:9", "no_proxy": "*"}, "*"),
    ],
)
def test_no_proxy_stands_before_servers_on_loopback(
    variables: dict[str, str], kept: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, "")  # so that it is put back
            monkeypatch.delenv(spelling)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings.reach_loopback_directly()
    for host in ("127.0.0.1", "localhost"):
        url = f"http://{host}:{port}"
        assert httpx.get(url).status_code == 204
        assert requests.get(url, timeout=60).status_code == 204
        assert urllib.request.urlopen(url, timeout=60).status == 204
    seen = settings.data_plane_environment()
    assert seen.get("no_proxy") == seen.get("NO_PROXY")
    assert seen.get("no_proxy", "").startswith(kept or "")
    assert ("no_proxy" in seen) == (kept is not None)


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_another_machine_trusts_the_same_certificates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/etc/corp.pem")
    assert settings.data_plane_environment()[name] == "/etc/corp.pem"


def test_nccl_is_given_a_whole_name_of_an_interface() -> None:
    """It takes a plain one as a prefix of names: eth0 would be eth01 too. Gloo knows whole names only."""
    environment = settings.interface_environment("eth0")
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
