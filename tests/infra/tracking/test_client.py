"""A client leaves nothing behind that the next run would take for the operator's wish."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import mlflow
import pytest

from infra.refusal import Refusal
from infra.settings import tracking_uri
from infra.tracking.client import REGISTRY_ERRORS, check_answers, connect, give_up_soon
from infra.tracking.permissions import check_writable
from infra.tracking.registry import find_version
from tests.certificates import self_signed


class Guarded(BaseHTTPRequestHandler):
    """Answers those who bring a credential."""

    def do_GET(self) -> None:
        open_to_all = self.path.endswith("/health")
        self.answer(200 if open_to_all or self.headers.get("Authorization") else 401, "{}", "application/json")

    def answer(self, status: int, body: str, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Broken(Guarded):
    """A tracking server whose database is away."""

    asked = 0

    def do_GET(self) -> None:
        if self.path != "/health":
            Broken.asked += 1
        self.send_response(200 if self.path == "/health" else 500)
        self.end_headers()


class LoginPage(Guarded):
    """What a proxy with a login shows to programs."""

    def do_GET(self) -> None:
        self.answer(200, "<html>Who are you?</html>", "text/html")


class Older(Guarded):
    """Knows no logged models."""

    def do_GET(self) -> None:
        self.answer(200, "2.22.5" if self.path == "/version" else "{}", "application/json")


class OtherPath(Guarded):
    """A server behind a path, asked without it."""

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, "<html>Not Found</html>", "text/html")


@contextmanager
def guarded_server(certificate: Path | None = None, answers: type[Guarded] = Guarded) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"localhost:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("given", [None, "http://127.0.0.1:9"])
def test_the_address_of_one_run_is_not_that_of_the_next(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path / "runs"))
    if given is None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    before, own = tracking_uri(), f"sqlite:///{tmp_path / 'own.db'}"
    connect(own)
    assert mlflow.get_tracking_uri() == own
    assert tracking_uri() == before


def test_a_server_behind_a_private_certificate_a_token_or_a_user_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, both = self_signed(tmp_path)
    with guarded_server() as place:
        check_answers(f"http://ops:secret@{place}")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
        check_answers(f"http://{place}")
    with guarded_server(both) as place:
        with pytest.raises(Refusal, match="does not answer"):
            check_answers(f"https://{place}")
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate))
        check_answers(f"https://{place}")
    with pytest.raises(Refusal, match="does not answer"):
        check_answers("http://127.0.0.1:9")


@pytest.mark.timeout(60)
def test_a_server_without_its_database_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    give_up_soon()
    with guarded_server(answers=Broken) as place:
        check_answers(f"http://{place}")
        Broken.asked = 0
        with pytest.raises(REGISTRY_ERRORS):
            find_version(f"http://{place}", "draft", 1)
    assert Broken.asked <= 2


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (Guarded, r"does not let this user in .401.*MLFLOW_TRACKING_USERNAME"),
        (LoginPage, r"what answers at .* is no MLflow server .200, text/html.*MLFLOW_TRACKING_TOKEN"),
        (Older, r"is 2.22.5, and a draft is a logged model, which servers have from 3.0 on"),
        (OtherPath, r"what answers at .* is no MLflow server .404, text/html.*with its path"),
    ],
)
def test_a_server_that_does_not_let_in_is_refused_at_once(
    answers: type[Guarded], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    with guarded_server(answers=answers) as place:
        with pytest.raises(Refusal, match=why):
            check_answers(f"http://{place}")
        with pytest.raises(Refusal, match=why):
            check_writable(f"http://{place}", "draftsmith", "draft-x", datasets=True)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("sqlite://runs/x.db", "names no file .*sqlite:////folder/name.db"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///", "names no file"),
        ("http:/host", "names no host: correct tracking.uri"),
        ("http://:5000", "names no host"),
        ("postgresql://me:secret@host/mlflow", r"begin it with postgresql\+psycopg://"),
        ("mysql://me@host/mlflow", "of no kind that works here"),
        ("databricks", "of no kind that works here"),
        ("127.0.0.1:5000", "of no kind that works here"),
        ("mlruns", "of no kind that works here"),
    ],
)
def test_a_mistyped_address_is_refused_with_the_remedy(address: str, why: str) -> None:
    for asked in (check_answers, connect):
        with pytest.raises(Refusal, match=why) as refused:
            asked(address)
        assert "secret" not in str(refused.value)


def test_an_address_may_have_blanks_around_it_and_capitals_in_its_scheme(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert connect(f" SQLite{address.removeprefix('sqlite')}\n").tracking_uri == address
    with guarded_server(answers=LoginPage) as place, pytest.raises(Refusal, match="is no MLflow server"):
        check_answers(f" HTTP://{place}")
    check_answers("postgresql+psycopg://me:secret@127.0.0.1:9/mlflow")
