"""Servers that give no report: what stands in between is no reason to end one, and never all of them at once."""

import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import psutil
import pytest

from infra.refusal import Refusal
from infra.serving.config import ServerConfig
from infra.serving.failures import ReportFailure, read_failure
from infra.serving.fleet import Fleet
from infra.serving.rollout import NO_DRAFT, RolloutState
from infra.serving.servers import ServerClient, ServerReport
from tests.certificates import self_signed
from tests.infra.serving.serving_world import SETTLED_S, ServingWorld, serving_world, with_options

PROXY_PAGE = b"<html>no healthy upstream</html>"


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str) -> Iterator[ServingWorld]:
    with serving_world(path_in_memory, registry_in_memory, 2) as world:
        yield world


def failure_at(url: str, has_restart: bool = False) -> ReportFailure:
    with pytest.raises((httpx.HTTPError, ValueError)) as failed:
        ServerClient(url).report()
    assert isinstance(failed.value, httpx.HTTPError | ValueError)
    return read_failure(failed.value, url, has_restart)  # type: ignore[arg-type]


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """`answering(STATUS, PAGE)`: the address of a server that answers so at /health, and else with an empty page."""
    given: list[tuple[int, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, page = given[-1] if self.path == "/health" else (200, b"")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

        def answer(status: int, page: bytes) -> str:
            given.append((status, page))
            return f"http://127.0.0.1:{server.server_port}"

        yield answer
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "page", "kind"),
    [
        (503, b"", "failing"),
        (500, b"Internal Server Error", "failing"),
        (503, PROXY_PAGE, "unreachable"),
        (502, PROXY_PAGE, "unreachable"),
        (504, b"", "unreachable"),
        (429, b"", "unreachable"),
        (200, b"", "unreachable"),  # its further pages are no JSON
    ],
)
def test_only_its_own_answer_says_that_a_server_is_unhealthy(
    status: int, page: bytes, kind: str, answering: Callable[[int, bytes], str]
) -> None:
    url = answering(status, page)
    failure = failure_at(url)
    assert failure.kind == kind
    if kind == "unreachable":
        assert failure.words.startswith(f"{url} ")


def test_a_port_where_nothing_listens_refuses_and_one_that_says_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.serving.servers.HEALTH_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert failure_at(url).kind == "refused"
        listener.listen()
        assert failure_at(url).kind == "failing"


def test_a_server_that_ends_during_the_handshake_has_no_bad_certificate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take_and_close() -> None:
            taken, _ = listener.accept()
            taken.recv(65_536)
            taken.close()

        Thread(target=take_and_close, daemon=True).start()
        assert failure_at(f"https://127.0.0.1:{listener.getsockname()[1]}").kind == "failing"


def test_names_and_proxies_say_nothing_about_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("NO_PROXY", "server.invalid")
    assert "resolution of names" in failure_at("http://server.invalid:1").words
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    failure = failure_at("http://server.invalid:1")
    assert failure.kind == "unreachable"
    assert "$NO_PROXY" in failure.words


def test_certificates_that_are_not_trusted_end_no_server(
    world: ServingWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of authorities is replaced, lost, and put right again while the follower runs."""
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted := tmp_path / "trusted.pem"))
    (tmp_path / "other").mkdir()
    (certificate, both), (other, _) = self_signed(tmp_path), self_signed(tmp_path / "other")
    shutil.copy(certificate, trusted)
    servers = tuple(
        one.model_copy(update={"url": one.url.replace("http://127.0.0.1", "https://localhost")})
        for one in with_options(world, f"--ssl-certfile {both}")
    )
    world.promote(world.register())
    follower = world.follower(servers=servers, unhealthy_s=0.001, start_timeout_s=60.0)
    world.settle(follower)
    served = {process.pid for process in world.servers()}
    shutil.copy(other, trusted)
    for _ in range(3):
        follower.round()
    assert len({line for line in world.said if "renew its certificate" in line}) == 2
    trusted.unlink()
    for _ in range(3):
        follower.round()
    assert len({line for line in world.said if "$SSL_CERT_FILE cannot be read" in line}) == 2
    shutil.copy(certificate, trusted)
    world.settle(follower)
    assert {process.pid for process in world.servers()} == served
    assert not any("started again" in line for line in world.said)


def test_servers_that_hang_are_replaced_one_after_the_other(
    world: ServingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.promote(version := world.register())
    follower = world.follower(unhealthy_s=0.001, drain_s=0.001)
    world.settle(follower)
    served, before = world.servers(), len(world.said)
    monkeypatch.setattr("infra.serving.servers.HEALTH_S", 1.0)
    for process in served:
        process.suspend()
    deadline, left = time.monotonic() + SETTLED_S, set(served)
    while left:
        follower.round()
        assert time.monotonic() < deadline, world.said[-10:]
        ended = {process for process in left if not is_there(process)}
        assert len(ended) <= 1
        if ended and len(left) == 2:
            assert sum("started again" in line for line in world.said[before:]) == 1  # none is healthy, or slow, yet
            assert sum("replacement waits" in line for line in world.said[before:]) == 1
        elif ended:
            assert any("is healthy with" in line for line in world.said[before:]), "the first one came back before"
        left -= ended
    world.settle(follower)
    assert world.running() == [version] * 2


def test_a_server_that_hangs_is_replaced_beside_one_that_cannot_be_judged(
    world: ServingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one was started, and its certificate is not trusted: it stays as it is for as long as that lasts."""
    world.promote(version := world.register())
    follower = world.follower(unhealthy_s=0.001, drain_s=0.001)
    world.settle(follower)
    (unjudged, hung), report = follower._fleet.urls, ServerClient.report

    def fail(client: ServerClient) -> ServerReport:
        if client.url == unjudged:
            raise httpx.ConnectError("certificate") from ssl.SSLError("expired")
        if client.url == hung and process.is_running():
            raise httpx.ReadTimeout("timed out")
        return report(client)

    monkeypatch.setattr(ServerClient, "report", fail)
    process = next(one for one in world.servers() if hung.rpartition(":")[2] in one.cmdline())
    process.suspend()
    follower._keep(follower.state.model_copy(update={"started": {unjudged: version}}))
    deadline = time.monotonic() + SETTLED_S
    while is_there(process):
        follower.round()
        assert time.monotonic() < deadline, world.said[-10:]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), OSError(113, "No route to host")])
def test_a_restarted_server_whose_host_is_gone_is_restarted(
    world: ServingWorld, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stopped container's is; one of our own runs, whatever its name says."""
    own, other = world.config().servers
    runs = world.folder / "runs"
    other = ServerConfig(url=other.url, restart=f"sh -c 'echo run >> {runs}'")

    def connect(*_: object, **__: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    assert failure_at(own.url).kind == "unreachable"
    assert failure_at(other.url, has_restart=True).kind == "failing", "one at a time, where all names are lost"
    fleet = Fleet(world.config(servers=(other,), unhealthy_s=1e-9), world.said.append)
    state = RolloutState(target=NO_DRAFT, stable=NO_DRAFT)
    conditions = [fleet.look(state)[0].seen.condition for _ in range(2)]
    assert conditions == ["starting", "down"]
    assert str(error.strerror) in world.said[-1]


def test_unreadable_certificates_concern_https_alone(
    world: ServingWorld, answering: Callable[[int, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "lost.pem"))
    url = answering(503, b"")
    assert failure_at(url).words == "/health answers 503 Service Unavailable"
    https = url.replace("http:", "https:")
    assert "put back the file" in failure_at(https).words
    servers = (world.config().servers[0].model_copy(update={"url": https}),)
    with pytest.raises(Refusal, match="did not start answers there"):
        world.follower(servers=servers)


def is_there(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
