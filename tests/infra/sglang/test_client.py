"""Asking a server over HTTP: what loopback does to requests, seen with a server in place of SGLang."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infra.processes.process import Owner, ProcessFailedError
from infra.sglang.client import SGLangClient
from infra.sglang.server import SGLangServer

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
