"""Why a server gave no report: by its own fault, or by that of something between it and the follower."""

import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import httpx

from infra.network.health import public
from infra.network.http import is_proxied
from infra.refusal import first_line

GATEWAYS = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
"""SGLang answers neither; what stands in front of a server does."""
BREAKS = (httpx.TimeoutException, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""The connection was made, or nobody took it, and no answer came."""


@dataclass(frozen=True)
class ReportFailure:
    """A server without a report."""

    kind: Literal["refused", "failing", "unreachable"]
    """`refused`: nothing listens at its port. `failing`: it hangs, breaks off, or /health says that it is unhealthy.
    `unreachable`: the answer, or its absence, says nothing about the server."""
    words: str
    """For people; with the remedy where it is unreachable."""


def read_failure(error: httpx.HTTPError | json.JSONDecodeError, url: str) -> ReportFailure:
    """What an error of `ServerClient.report` says about the server at `url`."""
    causes, words = [*_causes(error)], first_line(error)

    def has(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    if isinstance(error, httpx.HTTPStatusError):
        return _read_status(error.response, url)
    obstacles = (
        (has(json.JSONDecodeError), "its pages are not SGLang's, give the server's own address"),
        (has(ssl.SSLError), "renew its certificate, or put that of its authority into $SSL_CERT_FILE"),
        (has(socket.gaierror), "see to the resolution of names, or give an address in numbers"),
        (is_proxied(url), "a proxy of the environment is asked, name the server's host in $NO_PROXY"),
    )
    remedy = next((remedy for stands, remedy in obstacles if stands), None)
    if remedy is None and has(ConnectionRefusedError):
        return ReportFailure("refused", words)
    if remedy is None and isinstance(error, BREAKS):
        return ReportFailure("failing", words)
    return _unreachable(url, words, remedy or "see to the network between the follower and the server")


def _read_status(response: httpx.Response, url: str) -> ReportFailure:
    """SGLang's own 503 has no text (0.5.23, entrypoints/http_server.py); a proxy's has one."""
    path, status = response.request.url.path, response.status_code
    words = f"{path} answers {status} {response.reason_phrase}".rstrip()
    foreign = status in GATEWAYS or (status == HTTPStatus.SERVICE_UNAVAILABLE and response.content)
    if path.endswith("/health") and response.is_server_error and not foreign:
        return ReportFailure("failing", words)
    return _unreachable(url, words, "see to what stands in front of the server, or give the server's own address")


def _unreachable(url: str, words: str, remedy: str) -> ReportFailure:
    return ReportFailure("unreachable", f"{public(url)} cannot be judged and is left as it is ({words}): {remedy}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
