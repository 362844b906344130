"""Asking a server over HTTP: what loopback does to requests, seen with a server in place of SGLang."""

import json
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from infra.network.http import open_client
from infra.processes.process import Owner, ProcessFailedError
from infra.refusal import Refusal
from infra.sglang.client import PromptRefusedError, ServerBusyError, ServerError, SGLangClient
from infra.sglang.server import SGLangServer
from tests.certificates import self_signed

CLOSES_IDLE_CONNECTIONS = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(b"{}")

    def do_POST(self):
        if getattr(self, "answered", False):  # as if the time for idle connections ended in this very moment
            self.close_connection = True
            return
        self.answered = True
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'{"output_ids": [1], "meta_info": {}}')

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SGLangServer]:
    def command(port: int) -> list[str]:
        return [sys.executable, "-c", CLOSES_IDLE_CONNECTIONS, str(port)]

    started = SGLangServer(command, "server", Owner("tests", tmp_path), {}, 240.0)
    yield started
    started.stop()


def test_a_connection_that_the_server_closes_between_requests_costs_nothing(server: SGLangServer) -> None:
    with closing(SGLangClient(server, 120.0)) as client:
        assert [client.generate([1, 2], {}).tokens for _ in range(3)] == [[1]] * 3


def test_a_server_that_kills_itself_after_an_exception_names_it(tmp_path: Path) -> None:
    script = "echo 'KeyError: 7'; echo '[now] kill_process_tree called: include_parent=True'; kill -9 $$"
    with pytest.raises(ProcessFailedError) as failed:
        SGLangServer(lambda _: ["bash", "-c", script], "server", Owner("tests", tmp_path), {}, 240.0)
    assert failed.value.headline == "server ended with exit code 1"
    assert failed.value.cause == "KeyError: 7"


@dataclass(frozen=True)
class Operated:
    """A server that somebody else runs."""

    address: str
    name: str = "the server"
    log: str = "elsewhere"

    def check(self) -> None: ...


@contextmanager
def answering(
    status: int, body: dict[str, Any], certificate: Path | None = None, before: Callable[[], object] = lambda: None
) -> Iterator[Operated]:
    """A server with one answer to everything, given after `before`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            before()
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has left
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        yield Operated(f"{'https' if certificate else 'http'}://localhost:{server.server_port}")
        server.shutdown()


ABORTED = {"meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {}, PromptRefusedError, "refused the prompt of 2 tokens"),
        (401, {}, Refusal, "DRAFTSMITH_SGLANG_API_KEY"),
        (404, {}, Refusal, "not a gateway's"),
        (308, {}, Refusal, "not a gateway's"),
        (429, {}, ServerBusyError, "too busy for a prompt of 2 tokens: 429"),
        (503, {}, ServerBusyError, "too busy for a prompt of 2 tokens: 503"),
        (500, {}, ServerError, "failed at a prompt"),
        (200, ABORTED, ServerError, "Abort in waiting queue"),
    ],
)
def test_only_a_prompt_that_is_refused_is_the_prompts_fault(
    status: int, body: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with answering(status, body) as server, closing(SGLangClient(server, 60.0)) as client:
        with pytest.raises(kind, match=message) as failed:
            client.generate([1, 2], {})
    assert type(failed.value) is kind


def test_a_server_may_take_longer_for_its_first_answer() -> None:
    """On a GPU it compiles its kernels then."""
    answers, over = iter([1.0]), Event()
    found = {"output_ids": [7], "meta_info": {}}
    with answering(200, found, before=lambda: over.wait(next(answers, None))) as server:
        with closing(SGLangClient(server, 0.5, 240.0)) as client:
            assert client.generate([1, 2], {}).tokens == [7]
            with pytest.raises(ServerError, match=r"within 0\.5 s \(generator\.sglang\.request_timeout_s\)"):
                client.generate([1, 2], {})
            over.set()
    over = Event()
    with answering(200, found, before=over.wait) as server, closing(SGLangClient(server, 0.1, 0.5)) as client:
        with pytest.raises(ServerError, match=r"within 0\.5 s \(generator\.sglang\.start_timeout_s, for the first"):
            client.generate([1, 2], {})
        over.set()


def test_a_server_with_a_certificate_of_the_operators_own_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loopback addresses, too."""
    certificate, both = self_signed(tmp_path)
    with answering(200, {"version": "1"}, both) as server:
        with open_client(server.address, 60.0) as client, pytest.raises(httpx.ConnectError):
            client.get("/server_info")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with open_client(server.address, 60.0) as client:
            assert client.get("/server_info").json() == {"version": "1"}
        with closing(SGLangClient(server, 60.0)) as client:
            assert client.settings() == {"version": "1"}
